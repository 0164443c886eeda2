"""From a traced fx graph to a `Graph`: names, types, origins, effects, and where each flat argument comes from."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn

from fxpipe.errors import CaptureError
from fxpipe.ir.graph import Graph, Input, Op, Origin, Ref, Size, State
from fxpipe.ir.types import ScalarType, TensorType, ValueType

from .arguments import Call
from .dynamo import Traced
from .effects import Step, memory, steps
from .explain import at, innermost, parse_stack
from .hollow import Slot
from .names import Names
from .symbols import BATCH, first_symbols, symbol, text, type_of


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


@dataclass
class Builder:
    """What is known while a graph is built: the present name of every node's value, and the nodes of every tensor."""

    model: nn.Module
    traced: Traced
    call: Call
    slots: Mapping[int, list[Slot]]
    modules: Mapping[str, str]
    names: Names = field(default_factory=Names)
    of_node: dict[fx.Node, str] = field(default_factory=dict)
    nodes_of: dict[int, list[fx.Node]] = field(default_factory=dict)  # by the id of the tensor object
    symbols: dict[sympy.Symbol, str] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    sizes: list[Size] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)
    first: dict[fx.Node, str] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    sharing: dict[int, list[str]] = field(default_factory=dict)  # by storage: the names of the values in it
    state_of: dict[str, State] = field(default_factory=dict)
    last_read: dict[str, int] = field(default_factory=dict)
    baked: str | None = None
    draws: int = 0


def draft(model: nn.Module, traced: Traced, flat: tuple[Any, ...], call: Call, slots: list[Slot]) -> Draft:
    """The graph of what was traced; `flat` are the (hollow) arguments it was first called with."""
    by_id: dict[int, list[Slot]] = {}
    for slot in slots:
        if slot.twin is not None:
            by_id.setdefault(id(slot.twin), []).append(slot)
    modules = {str(id(module)): path for path, module in model.named_modules()}
    build = Builder(model, traced, call, by_id, modules)
    env, found = steps(traced)
    placeholders = [node for node in traced.module.graph.nodes if node.op == "placeholder"]
    _inputs(build, placeholders, flat, env)
    _states(build, placeholders, flat, env)
    build.first = dict(build.of_node)
    build.state_of = {state.name: state for state in build.states}
    _ops(build, found, env)
    results = next(node for node in traced.module.graph.nodes if node.op == "output").args[0]
    outputs = tuple(build.of_node[node] for node in results)
    graph = Graph(
        type(model).__name__,
        model.training,
        tuple(build.inputs),
        tuple(build.sizes),
        tuple(build.states),
        tuple(build.ops),
        (),
        ((), {}),
        None,
    )
    held = {build.first[node]: value for node, value in zip(placeholders, flat, strict=True) if node in build.first}
    return Draft(graph, outputs, tuple(env[node] for node in results), build.places, held, build.symbols, build.baked)


def _inputs(build: Builder, placeholders: list[fx.Node], flat: tuple[Any, ...], env: dict[fx.Node, Any]) -> None:
    """Every tensor the user passed, whether the graph reads it or not, then numbers that vary; and the sizes."""
    at_leaf = {id(value): node for node, value in zip(placeholders, flat, strict=True) if isinstance(value, Tensor)}
    fakes: list[tuple[str, Any, int | None]] = []
    leaf_twins = {leaf.path: leaf.twin for leaf in build.call.leaves.values()}
    for leaf in build.call.leaves.values():
        node = at_leaf.get(id(leaf.twin))
        fakes.append((leaf.path, leaf.twin if node is None else env[node], leaf.batch_dim))
    for path, fake, dim in fakes:
        if dim is not None and (found := symbol(fake.shape[dim])) is not None:
            build.symbols |= dict.fromkeys((found, *first_symbols(fake.shape[dim])), BATCH)
        elif dim is not None and fake is not leaf_twins[path]:
            build.baked = path
    batch_names = [build.names(leaf.path) for leaf in build.call.leaves.values()]
    build.names.used.add(BATCH)
    for name, (path, fake, dim), leaf in zip(batch_names, fakes, build.call.leaves.values(), strict=True):
        for position, size in enumerate(fake.shape):
            found = symbol(size)
            if position == dim and not any(s.name == BATCH for s in build.sizes):
                build.sizes.append(Size(BATCH, name, position))
            elif found is not None and found not in build.symbols:
                build.symbols[found] = build.names(f"{name}_{position}")
                build.sizes.append(Size(build.symbols[found], name, position))
        kind = type_of(fake, build.symbols)
        if dim is not None and id(leaf.twin) not in at_leaf and isinstance(kind, TensorType):
            kind = TensorType(kind.dtype, (*kind.shape[:dim], BATCH, *kind.shape[dim + 1 :]), kind.device, kind.grad)
        build.inputs.append(Input(name, path, kind, dim))
        if id(leaf.twin) in at_leaf:
            _define(build, at_leaf[id(leaf.twin)], env, name)
    for position, (node, value) in enumerate(zip(placeholders, flat, strict=True)):
        _number(build, position, node, value, env)


def _number(build: Builder, position: int, node: fx.Node, value: Any, env: dict[fx.Node, Any]) -> None:
    """A placeholder that is a number: a size of a tensor, or an input of its own."""
    where = build.traced.names[position]
    found = symbol(env[node]) if not isinstance(value, Tensor) else None
    if not isinstance(where, str):
        build.of_node[node] = _size_name(build, _path(build, where[0]), where[1], found)
    elif not isinstance(value, Tensor) or _is_boxed(build, position, node):
        name = build.names(_path(build, where))
        if found is not None:
            build.symbols[found] = name
        kind: ValueType = ScalarType("float" if isinstance(value, Tensor) else type(value).__name__)
        build.inputs.append(Input(name, _path(build, where), kind, None))
        build.of_node[node] = name
        build.places[name] = position


def _size_name(build: Builder, path: str, dim: int, found: sympy.Symbol | None) -> str:
    """The name of a size of an argument. The graph may read the size without reading the tensor."""
    item = next((item for item in build.inputs if item.path == path), None)
    if item is None or found is None:
        raise CaptureError(f"the size of {path} in dimension {dim} varies; only those of arguments may")
    if found not in build.symbols:
        build.symbols[found] = BATCH if dim == item.batch_dim else build.names(f"{item.name}_{dim}")
        if build.symbols[found] != BATCH:
            build.sizes.append(Size(build.symbols[found], item.name, dim))
    return build.symbols[found]


def _is_boxed(build: Builder, position: int, node: fx.Node) -> bool:
    """Whether this is a Python float in a tensor, which the graph takes out again."""
    return build.traced.boxed[position] and all(user.target == "item" for user in node.users)


def _path(build: Builder, where: str) -> str:
    """How the user spells what Dynamo calls L['args'][0] or L['model'].scale."""
    found = re.match(r"L\['(args|kwargs|model)'\](?:\[('[^']*'|\d+)\])?(.*)", where, re.DOTALL)
    if found is None:
        return where
    root, first, rest = found.groups()
    if root == "model":
        path = re.sub(r"\.?(__dict__\[')?_(modules|parameters|buffers)('\])?", "", rest)
        return "self" + re.sub(r"\['(\w+)'\]", r".\1", path)
    positional = len(build.call.args)
    key = (first or "").strip("'")
    return (build.call.names[int(key)] if root == "args" and int(key) < positional else key) + rest


def _states(build: Builder, placeholders: list[fx.Node], flat: tuple[Any, ...], env: dict[fx.Node, Any]) -> None:
    """Placeholders that are the model's own: parameters, buffers, and whatever else it holds."""
    for position, (node, value) in enumerate(zip(placeholders, flat, strict=True)):
        if node in build.of_node or not isinstance(value, Tensor):
            continue
        if slots := build.slots.get(id(value)):
            _define(build, node, env, add_state(build, slots, type_of(env[node], build.symbols)))
        else:
            where = build.traced.names[position]
            path = _path(build, where if isinstance(where, str) else where[0])
            name = build.names(path.removeprefix("self."))
            kind = type_of(env[node], build.symbols)
            build.states.append(State(name, path.removeprefix("self."), "constant", kind, value=value))
            build.places[name] = position
            _define(build, node, env, name)
    for node in build.traced.module.graph.nodes:
        if node.op == "get_attr":
            name = build.names(str(node.target))
            kind = type_of(env[node], build.symbols)
            value = getattr(build.traced.module, str(node.target))
            build.states.append(State(name, name, "constant", kind, value=value))
            _define(build, node, env, name)


def add_state(build: Builder, slots: list[Slot], kind: ValueType) -> str:
    """The state of a parameter or buffer, under its first path."""
    first, *others = slots
    name = build.names(first.path)
    build.states.append(State(name, first.path, first.kind, kind, tuple(slot.path for slot in others)))
    return name


def _define(build: Builder, node: fx.Node, env: dict[fx.Node, Any], name: str) -> None:
    value = env[node]
    build.of_node[node] = name
    if isinstance(value, Tensor):
        build.nodes_of.setdefault(id(value), []).append(node)
    for address in memory(value):
        build.sharing.setdefault(address, []).append(name)


def _ops(build: Builder, found: list[Step], env: dict[fx.Node, Any]) -> None:
    build.last_read |= {node.name: i for i, step in enumerate(found) for node in step.node.all_input_nodes}
    for position, step in enumerate(found):
        first = step.node.args[0] if step.node.args else None
        if step.node.target == "item" and isinstance(first, fx.Node) and build.of_node.get(first) in build.places:
            build.of_node[step.node] = build.of_node[first]
        else:
            build.ops.append(_op(build, step, position, env))


def _op(build: Builder, step: Step, position: int, env: dict[fx.Node, Any]) -> Op:
    node = step.node
    origin = origin_of(node, build.modules)

    def leaf(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return Ref(build.of_node[item])
        return _size(build, item, origin) if isinstance(item, torch.SymInt) else item

    args, kwargs = _nest(node.args, leaf), _nest(node.kwargs, leaf)
    states = build.state_of
    touched = list(dict.fromkeys(name for address in step.written for name in build.sharing.get(address, ())))
    _refuse_writes(build, touched, origin)
    # What the op changed, where it stands for that: `x += 1` gives back x, `x[i] = v` gives back nothing.
    changed = env[node.args[0]] if node.target is operator.setitem else step.value  # type: ignore[index]
    owners = build.nodes_of.get(id(changed), []) if touched else []
    target = build.of_node[owners[0]] if owners else None
    living = _living(build, touched, position)
    writes = tuple(name for name in touched if name in living or name in states or name == target)
    name = build.names(_wish(node, target))
    kind = type_of(changed, build.symbols)
    draw = build.draws if step.random else None
    build.draws += step.random
    _define(build, node, {node: changed}, name)
    if target in states:
        build.of_node[node] = target  # a state keeps its name: later readers read it, not the op
    else:
        for owner in owners:
            build.of_node[owner] = name
    return Op(
        name,
        node.target,
        args,
        kwargs,
        kind,
        origin,
        step.regions,
        writes,
        draw,
    )


def _wish(node: fx.Node, target: str | None) -> str:
    """The name for an op: Dynamo's, after the user's variable; for `x.add_(1)` and `x[i] = v`, x again."""
    called = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = called.endswith("_") or node.target is operator.setitem
    if target is not None and in_place and re.sub(r"_*\d*$", "", node.name) == called.rstrip("_"):
        return re.sub(r"_\d+$", "", target)
    return node.name


def _living(build: Builder, names: list[str], position: int) -> set[str]:
    """Those of the names that are read after an op; what is returned is."""
    if not names:
        return set()
    return {
        name
        for node, name in build.of_node.items()
        if name in names
        and (build.last_read.get(node.name, -1) > position or any(user.op == "output" for user in node.users))
    }


def _refuse_writes(build: Builder, names: list[str], origin: Origin) -> None:
    for item in build.inputs if names else ():
        if item.name in names:
            raise CaptureError(
                f"{at(origin)}\nwrites into the input {item.path}, of which every stage has a copy of its own; "
                f"write {item.name} = {item.name} + 1 in place of {item.name} += 1"
            )
    for state in (build.state_of[name] for name in names if name in build.state_of):
        if state.kind != "buffer":
            what = "a plain tensor attribute" if state.kind == "constant" else "a parameter"
            raise CaptureError(
                f"{at(origin)}\nwrites into {state.path}, {what}; "
                f"make it a buffer: self.register_buffer({state.path.rsplit('.', 1)[-1]!r}, ...)"
            )


def _size(build: Builder, item: torch.SymInt, origin: Origin) -> Any:
    """A literal size in an argument: a number, a size's name, or an op that computes it."""
    said = text(item, build.symbols)
    if isinstance(said, int):
        return said
    if said in {size.name for size in build.sizes}:
        return Ref(said)
    raise CaptureError(f"{at(origin)}\nuses the size {said}, which no op computes")


def _nest(value: Any, leaf: Callable[[Any], Any]) -> Any:
    if isinstance(value, (tuple, list)):
        items = [_nest(item, leaf) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _nest(item, leaf) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_nest(item, leaf) for item in (value.start, value.stop, value.step)))
    return leaf(value)


def origin_of(node: fx.Node, modules: Mapping[str, str]) -> Origin:
    """The user's line that an op comes from, and the path of the module it is in."""
    module = ""
    for key, value in (node.meta.get("nn_module_stack") or {}).items():
        module = modules.get(str(key).split("@")[0], module)
        del value
    found = innermost(parse_stack(node.meta.get("stack_trace")), module)
    return found or Origin("", 0, "", module)
