"""The epilogue of a graph: what needs the whole batch at the end of a model, such as a loss that compares samples.

    image, text = f32[b, 8], f32[b, 8]                    of each micro-batch
    ------------------------------------------------
    logits = image @ text.t()       f32[B, B]             once, on the joined values of all micro-batches
    loss = cross_entropy(logits, arange(B))

An op belongs to the epilogue if an output depends on it that is not that of the whole batch in any other way, and if
nothing between them can be joined from micro-batches. What the epilogue takes are outputs of the last stage. Its
gradients go back to the micro-batches, so all forwards of the last stage come before its first backward, as in GPipe.

A model that mixes samples between its layers gets none: the layers behind would run on the whole batch.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fxpipe.batching.batch_dimension import follow
from fxpipe.batching.batch_facts import Flow, batch_dims
from fxpipe.batching.batch_reductions import Kind, kinds
from fxpipe.batching.join_outputs import Sizes, joined, of_one
from fxpipe.batching.mixed_samples import Reduce, find_mixed, said
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.dead_code import without_dead_ops
from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, State, op_name, rename
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.ops import PERMUTATIONS, RESHAPES
from fxpipe.ir.graph.shared_memory_values import memory
from fxpipe.ir.graph.value_types import ScalarType, TensorType, sized_by_data
from fxpipe.ir.unique_names import Names

SAME_ELEMENTS = RESHAPES | PERMUTATIONS | {"T", "mT", "detach"}
WEIGHT_DIMS = 2  # a tensor of so many dimensions that is trained, and is the same for all samples, is a layer's


class _Inseparable(Exception):
    """The epilogue would hold layers, random numbers or writes."""


def with_epilogue(
    graph: Graph, values: Sequence[str], exact: Mapping[str, Sizes], reduce: Reduce
) -> tuple[Graph, list[str]]:
    """The graph with an epilogue for those of its outputs `values` that need the whole batch and for which the user has
    given no `reduce`, and the values that its micro-batches give. Without such values, and if the epilogue would hold
    layers, both are as they were. `exact`: returned numbers, as functions of the sizes."""
    search = _Search(graph, reduce, follow(graph), kinds(graph))
    wanted = [value for value in values if value not in exact and search.needs_batch(value)]
    if not wanted:
        return graph, [*values]
    try:
        for value in wanted:
            search.compute(value)
        return _split(search, wanted, values)
    except _Inseparable:
        return graph, [*values]


@dataclass
class _Search:
    """The ops of the epilogue, and what they take, as far as they are known.

    - `inside`: the values that the epilogue computes; `taken`: the others that it reads, in order.
    """

    graph: Graph
    reduce: Reduce
    flow: Flow
    kinds: Mapping[str, Kind]
    inside: set[str] = field(default_factory=set)
    taken: dict[str, None] = field(default_factory=dict)

    @cached_property
    def states(self) -> Mapping[str, State]:
        return {state.name: state for state in self.graph.states}

    def needs_batch(self, value: str) -> bool:
        """Whether an output is not that of the whole batch, and the user has not said that it may be so."""
        plain = value in self.flow.made and isinstance(self.graph.types[value], (TensorType, ScalarType))
        return plain and said(self.graph, value, self.reduce) is None and not self.joins(value)

    def joins(self, value: str) -> bool:
        """Whether the value of the batch can be joined from those of the micro-batches."""
        try:
            joined(value, self.graph, self.flow, self.kinds, None)
            return not find_mixed(self.graph, self.flow, [value], None)
        except CaptureError:
            return False

    def compute(self, value: str) -> None:
        """Let the epilogue compute a value, and whatever it reads that micro-batches cannot give. Raises
        _Inseparable."""
        waiting = [value]
        while waiting:
            op = self.flow.made[waiting.pop()]
            if op.name in self.inside:
                continue
            if op.random or _written(op):
                raise _Inseparable
            self.inside.add(op.name)
            for name in op.reads:
                if self._is_given(name):
                    self.taken[name] = None
                elif name in self.flow.made:
                    waiting.append(name)

    def _is_given(self, name: str) -> bool:
        """Whether micro-batches give a value. Raises _Inseparable for the weights of a layer."""
        kind, state, op = self.graph.types[name], self.states.get(name), self.flow.made.get(name)
        if (state is not None and state.kind == "constant") or (op is not None and not self._leaves(op)):
            return False
        trained = state.kind == "parameter" if state is not None else op is not None and getattr(kind, "grad", False)
        if trained and len(getattr(kind, "shape", ())) >= WEIGHT_DIMS and name not in self.flow.depends:
            raise _Inseparable
        return True

    def _leaves(self, op: Op) -> bool:
        """Whether micro-batches give the result of an op, which is made of more than the batch size, and is no mere
        view of what they can give as well."""
        if not isinstance(op.type, TensorType) or sized_by_data(op.type) or not self.joins(op.name):
            return False
        of_size = not op.random and op.name not in self.flow.depends and batch_dims(op.type)
        return not of_size and not (op_name(op) in SAME_ELEMENTS and any(map(self.joins, op.reads[:1])))


def _split(search: _Search, wanted: Sequence[str], values: Sequence[str]) -> tuple[Graph, list[str]]:
    """The graph of the micro-batches with its epilogue, and the values that they give. Raises _Inseparable if one of
    these is written before the end."""
    graph = search.graph
    ops = [op for op in graph.ops if op.name in search.inside]
    sizes, taken = _sizes(search, ops)
    _check_writes(graph, taken)
    names, users = Names(graph.types), {name: op for op in reversed(ops) for name in op.reads}
    given = {name: _handed_on(name, graph, names, users.get(name)) for name in taken}
    renamed = {name: op.name for name, op in given.items() if op is not None}
    items = [_input(renamed.get(name, name), name, graph) for name in taken]
    results = [of_one(op.name, graph) for op in ops if op.name in wanted]
    read = {name for op in ops for name in op.reads}
    epilogue = replace(
        graph,
        inputs=tuple(items),
        sizes=(),
        states=tuple(state for state in graph.states if state.kind == "constant" and state.name in read),
        ops=tuple(rename(replace(op, writes=()), renamed) for op in (*sizes, *ops)),
        outputs=tuple(results),
        call=(tuple(Ref(item.name) for item in items), {}),
        result=tuple(Ref(output.value) for output in results),
        arguments=(),
        loss=None,
        totals=None,
    )
    rest = [value for value in values if value not in wanted] + [item.name for item in items]
    ahead = replace(
        graph,
        ops=(*graph.ops, *(op for op in given.values() if op is not None)),
        outputs=tuple(Output(value, None) for value in rest),
        epilogue=epilogue,
    )
    return without_dead_ops(ahead), rest


def _sizes(search: _Search, ops: Sequence[Op]) -> tuple[list[Op], list[str]]:
    """The ops that compute the sizes which the epilogue reads from values that it takes, and all these values."""
    graph, read = search.graph, {name for op in ops for name in op.reads}
    taken = [name for name in search.taken if not any(name == size.name for size in graph.sizes)]
    found: list[Op] = []
    for size in graph.sizes:
        if size.name in read:
            shapes = ((name, kind.shape) for name in taken if isinstance(kind := graph.types[name], TensorType))
            shown = next(((name, shape.index(size.name)) for name, shape in shapes if size.name in shape), None)
            if shown is None:
                taken.append(size.input)
                shown = (size.input, size.dim)
            user = next(op for op in ops if size.name in op.reads)
            found.append(Op(size.name, "size", (Ref(shown[0]), shown[1]), {}, ScalarType("int"), user.origin))
    return found, taken


def _check_writes(graph: Graph, taken: Sequence[str]) -> None:
    """Raise _Inseparable if an op writes into the memory of a value after it is made."""
    root, made = memory(graph.ops, graph.types), {op.name: at for at, op in enumerate(graph.ops)}
    last = {root(name): at for at, op in enumerate(graph.ops) for name in _written(op)}
    if any(last.get(root(name), -1) > made.get(name, -1) for name in taken):
        raise _Inseparable


def _written(op: Op) -> Collection[str]:
    """The values that an op writes. A submodule kept whole may write any of its buffers, and runs show whether it
    does."""
    return () if isinstance(op.target, Opaque) and not op.target.writes else op.writes


def _handed_on(name: str, graph: Graph, names: Names, user: Op | None) -> Op | None:
    """The op by which the last stage gives a value; None for a number that the caller passes."""
    kind = graph.types[name]
    if isinstance(kind, ScalarType):
        return None
    origin = user.origin if user is not None else Origin("", 0, "", "")
    return Op(names(f"{name}_out"), operator.getitem, (Ref(name), ...), {}, kind, origin)


def _input(name: str, source: str, graph: Graph) -> Input:
    return Input(name, "", graph.types[source], of_one(source, graph).batch_dim)
