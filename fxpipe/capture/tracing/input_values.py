"""Values of inputs that forward reads as Python's: they are known before anything runs, and steer the trace.

    if labels.max() >= self.vocab:            computed from the labels of the whole batch, as the plain model does
        raise ValueError(...)
    x = x[:, : lengths.max().item()]          a number in the graph

What is read depends on inputs and constants alone, by ops that draw nothing; where they write into inputs, these are
copied. It is the same for all micro-batches, and is part of the kind of call: a call for which it is another one is
traced again. So fractions are not read, which differ from batch to batch. Numbers of tensors that are made of constants
are constants in every trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.capture.call_arguments import Call, Leaf, holds_whole_numbers
from fxpipe.torch_internals.compiling.dynamic_sizes import size_of_tensor, source_of

from .effects.observed_writes import memory, tensors_in
from .effects.recorded_runs import RAN, Ran
from .storageless_tensors import traced_sizes

InputOf = Callable[[Tensor], Leaf | None]
MAKERS = frozenset({"arange", "tensor", "as_tensor", "zeros", "ones", "full", "eye"})
MOST = 256  # ops that are computed for one value
ASSERTIONS = ("_assert_async", "_assert_scalar")  # what an `assert` about a tensor, or a `torch._check`, is in a trace


@dataclass(frozen=True)
class ValuesRead:
    """What a trace has read of values of inputs: `compute` gives it for the inputs with these `paths`."""

    compute: fx.GraphModule
    paths: tuple[str, ...]
    values: tuple[Tensor, ...]

    def same(self, call: Call) -> bool:
        """Whether the values are those of this call."""
        reals = {leaf.path: leaf.real for leaf in call.leaves.values() if not leaf.real.is_meta}
        if not reals.keys() >= set(self.paths):
            return False
        with torch.no_grad():
            now = self.compute(*_beside(reals[path] for path in self.paths))
        return all(map(torch.equal, now, self.values))


@dataclass(frozen=True)
class Assertions:
    """What a trace asserts.

    - `read`: the values of inputs that this is about; None if there are none.
    - `failed`: an assertion that does not hold for these; `unknown`: those about other values.
    """

    read: ValuesRead | None = None
    failed: fx.Node | None = None
    unknown: tuple[fx.Node, ...] = ()


NO_ASSERTIONS = Assertions()


def assertions(graph: fx.Graph, input_of: InputOf) -> Assertions:
    """The user's assertions in a trace."""
    values, failed, unknown = ReadValues(input_of), [], []
    for node in graph.nodes:
        if not is_assertion(node):
            continue
        of = node.args[0]
        of = of.args[0] if isinstance(of, fx.Node) and of.target == "item" else of
        found = values.value(of, truth=True) if isinstance(of, fx.Node) else None
        if found is None:
            unknown.append(node)
        elif not found:
            failed.append(node)
    return Assertions(values.of_inputs, failed[0] if failed else None, tuple(unknown))


class ReadValues:
    """The values that are read in one trace. `input_of(stand_in)`: the input that a tensor without memory stands for;
    None for other tensors, and for all of them while values of inputs are not to be known."""

    def __init__(self, input_of: InputOf) -> None:
        self._input_of = input_of
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._values: dict[fx.Node, Any] = {}
        self._paths: list[str] = []
        self._read: dict[fx.Node, Tensor] = {}
        self._writing: set[fx.Node] = set()  # of the copies, those that write

    @property
    def of_inputs(self) -> ValuesRead | None:
        """What has been read of inputs until now."""
        if not self._read:
            return None
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self._graph, copies)
        graph.output(tuple(copies[node] for node in self._read))
        kept = {copies[node] for node in self._writing}
        # Also what failed is left out, as for samples that the batch does not have.
        graph.eliminate_dead_code(lambda node: node in kept or node.is_impure())
        return ValuesRead(fx.GraphModule({}, graph), tuple(self._paths), tuple(self._read.values()))

    def value(self, node: fx.Node, truth: bool = False, asking: fx.Node | None = None) -> Tensor | None:
        """The value of a tensor of the trace, if it is known. `truth`: only whether it is true is asked; `asking`: the
        op that asks, which has written nothing yet."""
        needed, writers = self._needed([node]), set[fx.Node]()
        while needed is not None and (more := _writers(needed, node.graph) - {*writers, asking}):
            writers |= more
            needed = self._needed([*needed, *writers])
        if needed is None:
            return None
        values, copies = ({}, {}) if writers else (self._values, self._copies)
        try:
            for one in node.graph.nodes:
                if one in needed and one not in values:
                    self._compute(one, needed, values, copies)
        except Exception:  # the model's own, which Dynamo reports with its line
            return None
        made = values[node]
        self._writing |= {copies[one] for one in writers}
        if type(made) is not Tensor or made.shape != traced_sizes(
            _example(node).shape
        ):  # one for each sample of the whole batch
            return None
        if any(one.op == "placeholder" for one in needed):
            copied = copies[node]
            if truth:
                self._read[self._graph.call_method("bool", (copied,))] = made.bool()
            elif holds_whole_numbers(made) or torch.equal(made, made.round()):
                self._read[copied] = made
            else:
                return None
        return made

    def _needed(self, nodes: Sequence[fx.Node]) -> Mapping[fx.Node, fx.Node | None] | None:
        """The nodes that values are made of, and for sizes of inputs, the inputs; None if that is not known."""
        needed: dict[fx.Node, fx.Node | None] = {}
        todo = [*nodes]
        while todo:
            one = todo.pop()
            if one in needed:
                continue
            needed[one] = owner = _owner(one) if one.op == "placeholder" else None
            if len(needed) > MOST or not (self._is_input(one, owner) or _is_plain_op(one)):
                return None
            todo += one.all_input_nodes + ([] if owner is None else [owner])
        return needed

    def _is_input(self, node: fx.Node, owner: fx.Node | None) -> bool:
        return owner is not None or (node.op == "placeholder" and self._leaf(node) is not None)

    def _leaf(self, node: fx.Node) -> Leaf | None:
        example = getattr(node.meta.get("grapharg"), "example", None)
        return self._input_of(example) if isinstance(example, Tensor) else None

    def _compute(
        self,
        node: fx.Node,
        needed: Mapping[fx.Node, fx.Node | None],
        values: dict[fx.Node, Any],
        copies: dict[fx.Node, fx.Node],
    ) -> None:
        """Add the value of one node, of which all before are known. Inputs are copied if the values are for one time,
        as ops write into them."""
        owner = needed[node]
        leaf = self._leaf(node) if node.op == "placeholder" else None
        if leaf is not None:
            copies[node] = self._graph.placeholder(f"input_{len(self._paths)}")
            self._paths.append(leaf.path)
            values[node] = next(_beside([leaf.real]))
            if values is not self._values:
                copies[node], values[node] = self._graph.call_method("clone", (copies[node],)), values[node].clone()
            return
        if owner is not None:
            if owner not in values:
                self._compute(owner, needed, values, copies)
            _, dim = size_source(node)
            copies[node] = self._graph.call_method("size", (copies[owner], dim))
            values[node] = values[owner].shape[dim]
            return
        args, kwargs = _on_cpu(node)
        copies[node] = self._graph.create_node(node.op, node.target, *fx.map_arg((args, kwargs), copies.__getitem__))
        args, kwargs = fx.map_arg((args, kwargs), values.__getitem__)
        with torch.no_grad():
            if node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                assert callable(node.target)
                values[node] = node.target(*args, **kwargs)


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def size_source(placeholder: fx.Node) -> tuple[Any, int]:
    """The source of a tensor, and the dimension, for a placeholder that is a size of it; else (None, 0)."""
    return size_of_tensor(source_of(placeholder)) or (None, 0)


def _owner(placeholder: fx.Node) -> fx.Node | None:
    """The placeholder of the tensor that a size is of."""
    found, _ = size_source(placeholder)
    placeholders = (node for node in placeholder.graph.nodes if node.op == "placeholder" and found is not None)
    return next((node for node in placeholders if source_of(node) == found), None)


def _is_plain_op(node: fx.Node) -> bool:
    """Whether an op makes its result of its arguments alone, and changes nothing but these."""
    if node.op not in ("call_function", "call_method"):
        return False
    ran: Ran | None = node.meta.get(RAN)
    if ran is not None:
        return not ran.random
    return node.target is operator.setitem or _is_number(_example(node)) or _is_maker(node)


def _is_maker(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in MAKERS and not node.all_input_nodes


def _is_number(value: Any) -> bool:
    """Whether a value has no tensor: a number, or several."""
    return value is not None and next(tensors_in(value), None) is None


def is_assertion(node: fx.Node) -> bool:
    """Whether a node is an assertion of the user's, and none that torch has added."""
    return _asserts(node) and "source_fn_stack" in node.meta


def _asserts(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "").partition(".")[0] in ASSERTIONS


def _writers(needed: Mapping[fx.Node, Any], graph: fx.Graph) -> set[fx.Node]:
    """The ops of the graph that write, or may write, into the memory of what is needed."""
    held = {key for node in needed for key in memory(_example(node))}
    found = set()
    for node in graph.nodes:
        ran: Ran | None = node.meta.get(RAN)
        if ran is not None and not held.isdisjoint(ran.written):
            found.add(node)
        idle = node.op in ("placeholder", "output") or _is_number(_example(node)) or _asserts(node)
        unknown = ran is None and not idle
        reads = node.all_input_nodes[: 1 if node.target is operator.setitem else None]
        if unknown and not held.isdisjoint(key for read in reads for key in memory(_example(read))):
            found.add(node)
    return found


def _on_cpu(node: fx.Node) -> tuple[Any, Any]:
    """The arguments of an op, which makes its result on the CPU."""
    kind = str(getattr(_example(node), "device", ""))

    def local(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) or (kind and value == kind) else value

    return tuple(map(local, node.args)), {key: local(value) for key, value in node.kwargs.items()}


def _beside(reals: Iterable[Tensor]) -> Iterator[Tensor]:
    """The values of inputs, on the CPU."""
    return (real.detach().to("cpu") for real in reals)
