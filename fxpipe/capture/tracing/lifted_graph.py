"""The entry point for graphs that torch.compile has traced: the model's tensors are arguments of the graph.

Dynamo guards what the graph depends on, so tensors need not be hollow here. But sizes need care: by default, the batch
size of the first call is a number, and later one symbol stands for all sizes that happen to be equal. So the graph is
traced again, with its own symbol for the batch, to find out whether it is valid for a micro-batch.

    L_x_: f32[8, 16]                      an input, cut along its batch      x: f32[b, 16]
    s77                                   a size of an input                 b
    L_self_modules_fc_parameters_weight_  the model's own, by its path       fc.weight
    L_self_pos, G_table                   what it holds otherwise            constants
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxpipe.batching.mixed_samples import Reduce
from fxpipe.batching.op_errors import at, without_symbols
from fxpipe.capture.batch_size.batch_size_checks import baking_line, check_sizes
from fxpipe.capture.call_arguments import Call, Leaf, common_size, cut_along
from fxpipe.capture.finish_graph import Finished, Seen, feed, finish, stand_ins
from fxpipe.capture.twins.twin import Slot
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.graph import Graph, Op, Origin, called
from fxpipe.ir.sample_lists import BatchDim
from fxpipe.torch_internals.compiling.dynamic_sizes import VaryingNumbers
from fxpipe.torch_internals.operator_classes import HigherOrderOperator
from fxpipe.torch_internals.tracing.tensors_without_memory import FakeTensorMode

from .dynamo import Traced, is_boxed, source_name
from .fx_to_graph import Draft, Owner, draft, origin_of
from .placeholders import attributes
from .rewriting.inline_checkpoints import inline_checkpoints
from .storageless_tensors import dense, hollow

Sizes = Callable[[int], Sequence[int]]
HELD = ("parameter", "buffer")
STATISTICS = ("batch_norm", "instance_norm")


@dataclass(frozen=True)
class Argument:
    """A flat argument: "parameter", "buffer" or "constant" of the model, "input", or "number"; and its path."""

    kind: str
    path: str


@dataclass(frozen=True)
class Lifted:
    """A graph of torch.compile: a copy, because the original loses the sources of its arguments, and the arguments.
    `held` has the parameters and buffers of the last call, by path."""

    module: fx.GraphModule
    arguments: tuple[Argument, ...]
    held: dict[str, Tensor] = field(default_factory=dict)

    def hold(self, flat: tuple[Any, ...]) -> dict[str, Tensor]:
        """Store the model's tensors of a call in `held`; returns those that differ from before."""
        given = zip(self.arguments, flat, strict=True)
        new = {i.path: x for i, x in given if i.kind in HELD and self.held.get(i.path) is not x}
        self.held.update(new)
        return new

    @property
    def origin(self) -> Origin:
        """The user's line that the first op comes from."""
        found = (origin_of(node, {}) for node in self.module.graph.nodes if node.op.startswith("call"))
        return next((origin for origin in found if origin.line), Origin("", 0, "", ""))

    @property
    def work(self) -> tuple[int, int]:
        """How many ops there are, and how many of them read parameters."""
        ops = [node for node in self.module.graph.nodes if node.op.startswith("call")]
        rows = zip(placeholders(self.module), self.arguments, strict=True)
        parameters = {node for node, argument in rows if argument.kind == "parameter"}
        return len(ops), sum(not parameters.isdisjoint(op.all_input_nodes) for op in ops)


@dataclass(frozen=True)
class CapturedGraph:
    """A graph as it was captured for calls that are cut along `batch_dim` into micro-batches, or are not cut."""

    lifted: Lifted
    batch_dim: BatchDim
    traced: Traced
    draft: Draft
    finished: Finished

    @property
    def graph(self) -> Graph:
        return self.finished.graph

    def renewed(self, flat: tuple[Any, ...]) -> CapturedGraph:
        """The same with the constants of this call."""
        finished = self.finished.renewed(flat)
        return self if finished is self.finished else replace(self, finished=finished)

    def inputs(self, flat: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of the graph's inputs."""
        return feed(self.graph, self.draft, call_of(self.lifted, flat, self.batch_dim), flat)

    def outputs(self, results: tuple[Any, ...], flat: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results of the traced graph, from the values of the graph's outputs."""
        call = call_of(self.lifted, flat, self.batch_dim)
        return tuple(give(results, call, flat) for give in self.finished.gives)

    def check(self, flat: tuple[Any, ...], sizes: Sizes) -> None:
        """Raise CaptureError if the graph does not hold for micro-batches of these sizes."""
        call = call_of(self.lifted, flat, self.batch_dim)
        check_sizes(self.traced, self.draft, call, sizes)


def lift(module: fx.GraphModule) -> Lifted:
    """What torch.compile hands to a backend, kept for the first call."""
    nodes = placeholders(module)
    wheres, kinds = list(map(source_name, nodes)), list(map(_kind, nodes))
    roots = {_root(where)[0] for where, kind in zip(wheres, kinds, strict=True) if kind in HELD}
    rows = zip(nodes, wheres, kinds, strict=True)
    arguments = tuple(Argument(kind, _path(where or node.name, kind, len(roots) > 1)) for node, where, kind in rows)
    return Lifted(copy_of(module), arguments)


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """The same nodes in a graph of their own."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _kind(node: fx.Node) -> str:
    argument, value = node.meta.get("grapharg"), node.meta["example_value"]
    source = getattr(argument, "source", None)
    if not isinstance(value, Tensor) or is_boxed(node):
        return "number"
    if isinstance(value, nn.Parameter):
        return "parameter"
    held = source is not None and "NN_MODULE" in source.guard_source.name
    if held and re.search(r"\._buffers\['[^']*'\]$", source_name(node)):
        return "buffer"
    return "constant" if held or source_name(node).startswith("G[") else "input"


def _root(where: str) -> tuple[str, str]:
    """The variable that a source starts from, and the rest."""
    found = re.match(r"[LG]\['(\w+)'\](.*)", where, re.DOTALL)
    return (found[1], found[2]) if found else ("", where)


def _path(where: str, kind: str, several: bool) -> str:
    """How the user spells a source; for a model's tensor without the model, unless there are `several`."""
    root, rest = _root(where)
    path = attributes(rest)
    if kind in ("input", "number"):
        return root + path
    path = path.lstrip(".")
    path = f"{root}.{path}" if several and path else path or root
    return path if kind == "constant" else re.sub(r"[^\w.]+", "_", path)


def call_of(lifted: Lifted, flat: tuple[Any, ...], batch_dim: BatchDim) -> Call:
    """The flat arguments as a call: the tensors among them that the user passes. Raises InputError if they have no
    common batch size."""
    given = [
        (item.path, value, cut_along(batch_dim, item.path, value))
        for item, value in zip(lifted.arguments, flat, strict=True)
        if item.kind == "input"
    ]
    batch = common_size(given)
    leaves = {id(value): Leaf(path, value, value, dim) for path, value, dim in given}
    args = tuple(value for _, value, _ in given)
    names = tuple(re.sub(r"\W+", "_", path).strip("_") for path, _, _ in given)
    return Call(args, {}, (args, {}), leaves, batch, batch, names, {})


def not_cut(lifted: Lifted) -> BatchDim:
    """The `batch_dim` of calls that are not cut."""
    return {item.path: None for item in lifted.arguments if item.kind == "input"}


def capture_lifted(
    name: str,
    lifted: Lifted,
    flat: tuple[Any, ...],
    batch_dim: BatchDim,
    *,
    reduce: Reduce = None,
    sizes: Sizes = lambda batch: (batch,),
) -> CapturedGraph:
    """The graph for calls with such flat arguments. Raises CaptureError where it does not hold for micro-batches of
    these sizes, InputError where the arguments have no common batch size."""
    call = call_of(lifted, flat, batch_dim)
    traced = retrace(lifted, flat, call)
    slots = [
        Slot(lifted.held, item.path, item.path, item.kind, value.device, {}, value, value)  # type: ignore[arg-type]
        for item, value in zip(lifted.arguments, flat, strict=True)
        if item.kind in HELD
    ]
    owner = Owner(name, torch.is_grad_enabled(), slots, _modules(lifted.module))
    try:
        drafted = draft(owner, traced, flat, call)
    except CaptureError:
        raise
    except Exception as error:  # whatever torch says of an op whose arguments have symbols for sizes
        raise CaptureError(f"cannot be traced: {type(error).__name__}: {without_symbols(error)}") from error
    if call.batch is not None:
        check_free(lifted, traced, drafted, call)
    check_sizes(traced, drafted, call, sizes)
    hollows = stand_ins(drafted)
    finished = finish(drafted, hollows, call, Seen(hollows, {}, (), slots), reduce)
    return CapturedGraph(lifted, batch_dim, traced, drafted, finished)


def check_free(lifted: Lifted, traced: Traced, graph: Draft, call: Call) -> None:
    """Raise CaptureError where torch.compile has made a number of the batch size, and the graph depends on it."""
    advice = "write torch.compile(..., dynamic=True), or torch._dynamo.mark_dynamic(x, 0) before the call"
    if graph.baked is not None:
        line = baking_line(traced, call.rows)
        raise CaptureError(f"{line}needs a batch of {call.batch}, which is a number in this graph; {advice}")
    write = next((op for op in graph.graph.ops if may_count(op, graph.graph)), None)
    if write is not None and not batch_varies(lifted, call):
        raise CaptureError(
            f"{at(write.origin)}writes {write.writes[0]}, in which samples may be counted, and the batch of "
            f"{call.batch} is a number in this graph; {advice}"
        )


def may_count(op: Op, graph: Graph) -> bool:
    """Whether an op writes into the model what may depend on the batch size: anything but statistics of samples."""
    states = {state.name for state in graph.states}
    counts_calls = called(op) == "add_" and op.args[1:] == (1,)
    return not states.isdisjoint(op.writes) and called(op) not in STATISTICS and not counts_calls


def batch_varies(lifted: Lifted, call: Call) -> bool:
    """Whether torch.compile has a symbol for the batch."""
    dims = {leaf.path: leaf.batch_dim for leaf in call.leaves.values() if leaf.batch_dim is not None}
    rows = zip(placeholders(lifted.module), lifted.arguments, strict=True)
    return all(varies(node.meta["example_value"].shape[dims[i.path]]) for node, i in rows if i.path in dims)


def varies(size: Any) -> bool:
    """Whether a size is a symbol that has not turned out to be a number."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _modules(module: fx.GraphModule) -> Mapping[str, str]:
    """The paths of the modules that ops come from, by what the trace calls them."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in module.graph.nodes)
    return {
        str(key).split("@")[0]: attributes(_root(where)[1]).lstrip(".")
        for stack in stacks
        for key, (where, _) in stack.items()
    }


def retrace(lifted: Lifted, flat: tuple[Any, ...], call: Call) -> Traced:
    """The graph with arguments of our own: the batch has a symbol, and so has what had one in torch.compile's trace."""
    module = copy_of(lifted.module)
    inline_checkpoints(module)
    nodes, arguments = placeholders(module), lifted.arguments
    numbers = VaryingNumbers()
    mode = FakeTensorMode(shape_env=numbers.env, allow_non_fake_inputs=True)
    sizes = _sizes_of(nodes, call, flat)
    fakes: dict[int, Any] = {}
    names: list[str | tuple[str, int]] = [item.path for item in arguments]
    for place, value in enumerate(flat):
        if isinstance(value, Tensor):
            dim = call.leaves[id(value)].batch_dim if id(value) in call.leaves else None
            given = arguments[place].kind == "input"
            fakes[place] = fake(
                numbers, mode, value, nodes[place].meta["example_value"] if given else value, dim, place
            )
            if arguments[place].kind == "number":
                fakes[place].item_memo = numbers.floating(value.item(), f"item_{place}")
    for place, value in enumerate(flat):
        traced = nodes[place].meta["example_value"]
        if varies(traced) and traced.node.expr in sizes:
            owner, dim = sizes[traced.node.expr]
            names[place], fakes[place] = (arguments[owner].path, dim), fakes[owner].shape[dim]
        elif not varies(traced):
            fakes.setdefault(place, value)
        else:
            fakes[place] = numbers.whole(value, f"number_{place}")
    for node in module.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            del node.meta["example_value"]  # it is of the other mode
    for place, node in enumerate(nodes):
        node.meta = node.meta | {"example_value": fakes[place]}
    boxed = tuple(a.kind == "number" and isinstance(value, Tensor) for a, value in zip(arguments, flat, strict=True))
    return Traced(module, mode, tuple(names), boxed)


def fake(
    numbers: VaryingNumbers, mode: FakeTensorMode, value: Tensor, traced: Tensor, batch_dim: int | None, place: int
) -> Tensor:
    """The argument without memory; its batch dimension and those that vary in torch.compile's trace have symbols."""
    symbols = [dim == batch_dim or varies(size) for dim, size in enumerate(traced.shape)]
    return numbers.tensor(mode, value if value.dim() == 0 else hollow(dense(value)), f"argument_{place}", symbols)


def _sizes_of(nodes: Sequence[fx.Node], call: Call, flat: tuple[Any, ...]) -> dict[Any, tuple[int, int]]:
    """Where the sizes of torch.compile's trace are found: the position of the tensor and the dimension, by the size's
    expression; at best a batch dimension."""
    found: dict[Any, tuple[int, int]] = {}
    batches: dict[Any, tuple[int, int]] = {}
    for place, (node, value) in enumerate(zip(nodes, flat, strict=True)):
        leaf = call.leaves.get(id(value))
        for dim, size in enumerate(node.meta["example_value"].shape if leaf is not None else ()):
            if leaf is not None and varies(size):
                (batches if dim == leaf.batch_dim else found).setdefault(size.node.expr, (place, dim))
    return found | batches
