"""Values of inputs that forward reads as Python's: they are known before anything runs, and steer the trace.

    if labels.max() >= self.vocab:            computed from the labels of the whole batch, as the plain model does
        raise ValueError(...)
    x = x[:, : lengths.max().item()]          a number in the graph

What is read depends on inputs and constants alone, by ops that draw nothing and write nothing. It is the same for all
micro-batches, and is part of the kind of call: a call for which it is another one is traced again. So fractions are not
read, which differ from batch to batch. Numbers of tensors that are made of constants are constants in every trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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

    @property
    def of_inputs(self) -> ValuesRead | None:
        """What has been read of inputs until now."""
        if not self._read:
            return None
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self._graph, copies)
        graph.output(tuple(copies[node] for node in self._read))
        graph.eliminate_dead_code()  # also what failed, as for samples that the batch does not have
        return ValuesRead(fx.GraphModule({}, graph), tuple(self._paths), tuple(self._read.values()))

    def value(self, node: fx.Node, truth: bool) -> Tensor | None:
        """The value of a tensor of the trace, if it is known. `truth`: only whether it is true is asked."""
        needed = self._needed(node)
        if needed is None or _may_be_written(needed, node.graph):
            return None
        try:
            for one in node.graph.nodes:
                if one in needed and one not in self._values:
                    self._compute(one, needed)
        except Exception:  # the model's own, which Dynamo reports with its line
            return None
        made = self._values[node]
        if type(made) is not Tensor or made.shape != traced_sizes(
            _example(node).shape
        ):  # one for each sample of the whole batch
            return None
        if any(one.op == "placeholder" for one in needed):
            copied = self._copies[node]
            if truth:
                self._read[self._graph.call_method("bool", (copied,))] = made.bool()
            elif holds_whole_numbers(made) or torch.equal(made, made.round()):
                self._read[copied] = made
            else:
                return None
        return made

    def _needed(self, node: fx.Node) -> Mapping[fx.Node, fx.Node | None] | None:
        """The nodes that a value is made of, and for sizes of inputs, the inputs; None if it is not known."""
        needed: dict[fx.Node, fx.Node | None] = {}
        todo = [node]
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

    def _compute(self, node: fx.Node, needed: Mapping[fx.Node, fx.Node | None]) -> None:
        """The value of one node, of which all before are known."""
        owner = needed[node]
        leaf = self._leaf(node) if node.op == "placeholder" else None
        if leaf is not None:
            self._copies[node] = self._graph.placeholder(f"input_{len(self._paths)}")
            self._paths.append(leaf.path)
            self._values[node] = next(_beside([leaf.real]))
            return
        if owner is not None:
            if owner not in self._values:
                self._compute(owner, needed)
            _, dim = size_source(node)
            self._copies[node] = self._graph.call_method("size", (self._copies[owner], dim))
            self._values[node] = self._values[owner].shape[dim]
            return
        args, kwargs = _on_cpu(node)
        self._copies[node] = self._graph.create_node(
            node.op, node.target, *fx.map_arg((args, kwargs), self._copies.__getitem__)
        )
        args, kwargs = fx.map_arg((args, kwargs), self._values.__getitem__)
        with torch.no_grad():
            if node.op == "call_method":
                self._values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                assert callable(node.target)
                self._values[node] = node.target(*args, **kwargs)


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
    """Whether an op makes its result of its arguments alone, and changes nothing."""
    if node.op not in ("call_function", "call_method"):
        return False
    ran: Ran | None = node.meta.get(RAN)
    if ran is not None:
        return not ran.written and not ran.random
    return _is_number(_example(node)) or _is_maker(node)


def _is_maker(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in MAKERS and not node.all_input_nodes


def _is_number(value: Any) -> bool:
    """Whether a value has no tensor: a number, or several."""
    return value is not None and next(tensors_in(value), None) is None


def _may_be_written(needed: Mapping[fx.Node, Any], graph: fx.Graph) -> bool:
    """Whether an op of the graph may write into the memory of what is needed."""
    held = {key for node in needed for key in memory(_example(node))}
    for node in graph.nodes:
        ran: Ran | None = node.meta.get(RAN)
        if ran is not None and not held.isdisjoint(ran.written):
            return True
        unknown = ran is None and node.op not in ("placeholder", "output") and not _is_number(_example(node))
        if unknown and not held.isdisjoint(key for read in node.all_input_nodes for key in memory(_example(read))):
            return True
    return False


def _on_cpu(node: fx.Node) -> tuple[Any, Any]:
    """The arguments of an op, which makes its result on the CPU."""
    kind = str(getattr(_example(node), "device", ""))

    def local(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) or (kind and value == kind) else value

    return tuple(map(local, node.args)), {key: local(value) for key, value in node.kwargs.items()}


def _beside(reals: Iterable[Tensor]) -> Iterator[Tensor]:
    """The values of inputs, on the CPU."""
    return (real.detach().to("cpu") for real in reals)
