"""From a traced fx graph to a `Graph`: names, types, origins, effects, and where each flat argument comes from."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn

from fxpipe.batching.data_sizes import with_named_data_sizes
from fxpipe.batching.op_errors import at, without_symbols
from fxpipe.capture.batch_size.squeeze_batch import with_named_squeezes
from fxpipe.capture.call_arguments import Call
from fxpipe.capture.capture_errors import line_of
from fxpipe.capture.opaque.opaque_gradients import with_possible_gradients
from fxpipe.capture.opaque.opaque_submodules import Piece
from fxpipe.capture.twins.twin import Slot, Twins
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.evaluate_graph import left_to_right
from fxpipe.ir.graph.graph import Graph, Op, Origin, Ref, map_leaves
from fxpipe.ir.graph.legal_cuts import ENTER_VMAP, LEAVE_VMAP
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.value_types import VMAP, TensorType, ValueType

from .dynamo import Traced
from .effects.op_effects import SET_DATA, Step, steps
from .layers.layer_values import Known
from .placeholders import Builder, add_inputs, add_states, define
from .rewriting.inline_checkpoints import CHECKPOINTED
from .rewriting.written_inputs import WrittenInputs, why_not_writable, with_copies
from .size_names import named_sizes
from .symbolic_sizes import text, type_of

# Which argument of these is the number of a vmap: it becomes what entered that vmap, so that they stay together.
VMAP_LEVEL = {"_add_batch_dim": 2, "_remove_batch_dim": 1}


@dataclass(frozen=True)
class Draft:
    """A graph that lacks what the user's object says: its outputs, result and call.

    `outputs` are the names of the traced outputs, `fakes` their fake values. Flat arguments: `places` has the place of
    each input that is a number and of each constant, `held` the tensor of each that is the model's or the user's.
    """

    graph: Graph
    outputs: tuple[str, ...]
    fakes: tuple[Any, ...]
    places: Mapping[str, int]
    held: Mapping[str, Any]
    symbols: Mapping[sympy.Symbol, str]
    baked: str | None  # an input whose batch size became a plain number
    squeezed: tuple[Op, ...]  # what would also take away a batch of one


@dataclass(frozen=True)
class Owner:
    """Whose graph it is: what the model is called, its mode and its tensors; the paths of its modules, by what traces
    call them; what its forward calls the sizes of its arguments."""

    name: str
    training: bool
    slots: Sequence[Slot]
    modules: Mapping[str, str]
    named_sizes: Mapping[tuple[str, int], str] = field(default_factory=dict)


def owner_of(model: nn.Module, twins: Twins) -> Owner:
    """What a trace of the twins is about."""
    modules = {str(id(module)): path for path, module in twins.named()}
    return Owner(type(model).__name__, model.training, twins.slots, modules, named_sizes(model.forward))


class InputsWritten(Exception):
    """Forward writes into arguments. Caught in this file."""

    def __init__(self, written: list[tuple[str, fx.Node, fx.Node]]) -> None:
        super().__init__()
        self.written = written


def drafted(owner: Owner, traced: Traced, flat: tuple[Any, ...], call: Call) -> tuple[Draft, WrittenInputs]:
    """The graph of what was traced; `flat` are the (hollow) arguments it was first called with. Where forward writes
    into arguments, it writes copies from now on, which are outputs."""
    try:
        return draft(owner, traced, flat, call, tell_written=True), WrittenInputs()
    except InputsWritten as found:
        written = with_copies(traced, found.written)
    return draft(owner, traced, flat, call), written


def draft(owner: Owner, traced: Traced, flat: tuple[Any, ...], call: Call, tell_written: bool = False) -> Draft:
    """The graph of what was traced. With `tell_written`, raises InputsWritten if forward writes into arguments that may
    be written; else these are refused."""
    by_id: dict[int, list[Slot]] = {}
    for slot in owner.slots:
        for tensor in {id(x): x for x in (slot.twin, slot.real) if x is not None}:
            by_id.setdefault(tensor, []).append(slot)
    build = Builder(traced, call, by_id, owner.modules, owner.named_sizes)
    with left_to_right():
        env, found = steps(traced)
    placeholders = [node for node in traced.module.graph.nodes if node.op == "placeholder"]
    add_inputs(build, placeholders, flat, env)
    add_states(build, placeholders, flat, env)
    build.first = dict(build.of_node)
    if tell_written and (written := _written(build, found)):
        raise InputsWritten(written)
    build.state_of = {state.name: state for state in build.states}
    results = next(node for node in traced.module.graph.nodes if node.op == "output").args[0]
    build.last_read = {node: i for i, step in enumerate(found) for node in _read_by(step.node)}
    build.returned = frozenset(results)
    _ops(build, found, env)
    outputs = tuple(build.of_node[node] for node in results)
    inputs, sizes, states, ops = tuple(build.inputs), tuple(build.sizes), tuple(build.states), tuple(build.ops)
    first = traced.module.meta.get(CHECKPOINTED)
    graph = Graph(owner.name, owner.training, inputs, sizes, states, ops, (), ((), {}), None, checkpointed=first)
    graph, squeezed = with_named_squeezes(with_named_data_sizes(graph))
    if torch.is_grad_enabled():
        graph = with_possible_gradients(graph)
    held = {build.first[node]: value for node, value in zip(placeholders, flat, strict=True) if node in build.first}
    fakes = tuple(env[node] for node in results)
    facts = build.places, held, build.symbols, build.baked, squeezed
    return Draft(graph, outputs, fakes, *facts)


def _written(build: Builder, found: list[Step]) -> list[tuple[str, fx.Node, fx.Node]]:
    """The arguments that may be written and are: path, placeholder, and the first op that writes."""
    paths = {item.name: item.path for item in build.inputs if isinstance(item.type, TensorType)}
    writers: dict[fx.Node, fx.Node] = {}
    for step in found:
        for address in step.written:
            for given in build.sharing.get(address, ()):
                writers.setdefault(given, step.node)
    named = [(paths[build.of_node[given]], given, by) for given, by in writers.items() if build.of_node[given] in paths]
    return [one for one in named if not why_not_writable(build.call, one[0])]


def _ops(build: Builder, found: list[Step], env: dict[fx.Node, Any]) -> None:
    for position, step in enumerate(found):
        first = step.node.args[0] if step.node.args else None
        if _makes_named_tuple(step.node):
            continue
        if step.node.target == "item" and isinstance(first, fx.Node) and build.of_node.get(first) in build.places:
            build.of_node[step.node] = build.of_node[first]
        else:
            build.ops.append(_op(build, step, position, env))


def _op(build: Builder, step: Step, position: int, env: dict[fx.Node, Any]) -> Op:
    node = step.node
    origin = origin_of(node, build.modules)

    def leaf(item: Any) -> Any:
        if isinstance(item, fx.Node):
            if _makes_named_tuple(item):
                return item.target(*map_leaves(item.args, leaf))  # type: ignore[operator]
            # A size that does not vary.
            fixed = type(env[item]) in (bool, int, float) and not (item.op == "placeholder" and item in build.of_node)
            return env[item] if fixed else Ref(build.of_node[item])
        return _size(build, item, origin) if isinstance(item, torch.SymInt) else item

    args, kwargs = map_leaves((node.args, node.kwargs), leaf)
    called = getattr(node.target, "__name__", "")
    if called in VMAP_LEVEL:
        index = VMAP_LEVEL[called]
        args = (*args[:index], Ref(build.vmaps[args[index] - 1]), *args[index + 1 :])
    states = build.state_of
    sharing = [node for address in step.written for node in build.sharing.get(address, ())]
    touched = list(dict.fromkeys(build.of_node[node] for node in sharing))
    _refuse_writes(build, touched, node, origin)
    _refuse_aliased(sharing, origin)
    # What the op changed, where it stands for that: `x += 1` gives back x, `x[i] = v` gives back nothing.
    changed = env[node.args[0]] if node.target is operator.setitem else env[node]  # type: ignore[index]
    owners = build.nodes_of.get(id(changed), []) if touched else []
    target = build.of_node[owners[0]] if owners else None
    living = {build.of_node[node] for node in sharing if build.last_read.get(node, -1) > position}
    lasting = {*living, *states, target}
    returned = {build.of_node[node] for node in sharing if node in build.returned}
    writes = tuple(name for name in touched if name in lasting or name in returned)
    name = build.names(_wish(node, target))
    kind = _type(build, changed)
    if called == ENTER_VMAP:
        build.vmaps.append(name)
        kind = VMAP
    elif called == LEAVE_VMAP:
        build.vmaps.pop()
        kind = VMAP
    elif called.endswith("_increment_nesting"):
        place = next((at(o) for n in _from(node) if (o := origin_of(n, build.modules)).line), "")
        raise CaptureError(f"{place}takes derivatives inside of forward with torch.func; write them out, as operations")
    elif called == "register_hook":
        raise CaptureError(
            f"{at(origin)}hangs a hook on a value in forward, which would see the gradient of each micro-batch; "
            "write an autograd.Function whose backward does what the hook does"
        )
    function: Any = node.target
    piece: Piece | None = getattr(node.target, "piece", None)
    if piece is not None:
        function, (tensors, *others) = piece.opaque, args
        args = (tuple(tensors), *others)
        buffers = zip(tensors, piece.opaque.buffers, strict=True)
        writes = tuple(dict.fromkeys(ref.name for ref, is_buffer in buffers if is_buffer))
    random = step.random or (piece is not None and piece.draws)
    draw = build.draws if random else None
    build.draws += random
    define(build, node, {node: changed}, name)
    if target in states:
        build.of_node[node] = target  # a state keeps its name: later readers read it, not the op
    else:
        for owner in owners:
            build.of_node[owner] = name
    return Op(name, function, args, kwargs, kind, origin, step.regions, writes, draw)


def _makes_named_tuple(node: fx.Node) -> bool:
    """Whether a node only puts values together, which stand in the arguments of the op that reads them."""
    return isinstance(node.target, type) and issubclass(node.target, tuple) and hasattr(node.target, "_fields")


def _read_by(node: fx.Node) -> Iterator[fx.Node]:
    """The values in the arguments of a node."""
    for read in node.all_input_nodes:
        yield from _read_by(read) if _makes_named_tuple(read) else (read,)


def _type(build: Builder, value: Any) -> ValueType:
    """The type of a value; that of tensors inside of layers is the same for all that are alike."""
    if not isinstance(value, Known):
        return type_of(value, build.symbols)
    if id(value.like) not in build.types:
        build.types[id(value.like)] = type_of(value.like, build.symbols)
    return build.types[id(value.like)]


def _from(node: fx.Node) -> Iterator[fx.Node]:
    """The node and those after it."""
    while node.op != "root":
        yield node
        node = node.next


def _wish(node: fx.Node, target: str | None) -> str:
    """The name for an op: Dynamo's, after the user's variable; for `x.add_(1)` and `x[i] = v`, x again."""
    called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = called.endswith("_") or node.target is operator.setitem
    if target is not None and in_place and re.sub(r"_*\d*$", "", node.name) == called.rstrip("_"):
        return re.sub(r"_\d+$", "", target)
    return node.name


def _refuse_writes(build: Builder, names: list[str], node: fx.Node, origin: Origin) -> None:
    for item in build.inputs if names else ():
        if item.name in names:
            why = why_not_writable(build.call, item.path) or "is cut into parts here"
            raise CaptureError(
                f"{at(origin)}writes into the input {item.path}, which {why}; write {item.name} = {item.name} + 1 in "
                f"place of {item.name} += 1"
            )
    for state in (build.state_of[name] for name in names if name in build.state_of):
        if state.kind == "constant" and state.path.startswith("G["):  # as Dynamo spells what a global variable holds
            raise CaptureError(
                f"{at(origin)}writes into a tensor that it reaches by a global variable; hold it in the model, as a "
                "buffer, or the module that has it as a submodule"
            )
        if state.kind == "constant":
            raise CaptureError(
                f"{at(origin)}writes into {state.path}, a plain tensor attribute; "
                f"make it a buffer: self.register_buffer({state.path.rsplit('.', 1)[-1]!r}, ...)"
            )
        if state.kind == "parameter" and node.target in SET_DATA:
            raise CaptureError(
                f"{at(origin)}writes into {state.path}, a parameter, by giving it other memory; "
                "write weight.data.copy_(x) in place of weight.data = x"
            )


def _refuse_aliased(written: list[fx.Node], origin: Origin) -> None:
    """A piece that is kept whole may return what it was given; in the pipeline it returns a copy then. It is told that
    this is written into, lest it do so another time."""
    for node in written:
        opaque = getattr(node.target, "opaque", None)
        if not isinstance(opaque, Opaque):
            continue
        opaque.written.append(origin)
        if any(promise.aliased for promise in opaque.promises):
            raise CaptureError(
                f"{at(origin)}writes into what {opaque} returns, which is kept whole and may return what it was "
                "given; write y = y + 1 in place of y += 1"
            )


def _size(build: Builder, item: torch.SymInt, origin: Origin) -> Any:
    """A literal size in an argument: a number, a size's name, or an op that computes it."""
    said = text(item, build.symbols)
    if isinstance(said, int):
        return said
    if said in {size.name for size in build.sizes}:
        return Ref(said)
    raise CaptureError(
        f"{at(origin)}uses the size {without_symbols(said)}, which no op computes; "
        "write it as x.shape[0] or x.size(0) of the tensor that has it"
    )


def origin_of(node: fx.Node, modules: Mapping[str, str]) -> Origin:
    """The user's line that an op comes from, and the path of the module it is in."""
    module = ""
    for key in node.meta.get("nn_module_stack") or ():
        module = modules.get(str(key).split("@")[0], module)
    return line_of(node, module) or Origin("", 0, "", module)
