"""Totals: what a micro-batch must know about the whole batch, so that its part of the loss is exact.

    loss = (errors * mask).sum() / mask.sum()

is no mean over samples: micro-batches differ in `mask.sum()`. But `mask.sum()` depends only on the user's inputs, so
`Graph.totals` computes it once for the whole batch, before the batch is cut. Micro-batches get it as an input, and the
loss is a sum over samples.

torch's losses that divide by their own count are first rewritten in this form:

    cross_entropy(x, y)      becomes      cross_entropy(x, y, reduction="sum") / (y != -100).sum()
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.batching.batch_dimension import follow
from fxpipe.batching.batch_facts import batch_dims
from fxpipe.batching.batch_reductions import SAME, ZERO, kinds, labels_may_be_ignored, reduction
from fxpipe.batching.data_sizes import mask_of, product
from fxpipe.batching.loss_parts import COMBINED, needed, unknown_parts, with_named_parts, with_unknown_parts
from fxpipe.batching.mixed_samples import Reduce, said
from fxpipe.batching.selected_rows import rows_each, selected
from fxpipe.ir.graph.dead_code import without_dead_ops
from fxpipe.ir.graph.graph import Graph, Input, Op, Output, Ref, called, map_leaves, op_name, refs
from fxpipe.ir.graph.op_arguments import argument, arguments
from fxpipe.ir.graph.ops import DIVIDE, ELEMENTWISE_LOSSES, LABEL_LOSSES, MULTIPLY, ROW_LOSSES, SIZES, WEIGHTED_LOSSES
from fxpipe.ir.graph.value_types import ScalarType, TensorType, ValueType, tensors
from fxpipe.ir.once import once
from fxpipe.ir.unique_names import Names

from .mean_shares import with_shares

MEANS = {"mean"} | LABEL_LOSSES | ROW_LOSSES | ELEMENTWISE_LOSSES


def spread(graph: Graph, values: Sequence[str], reduce: Reduce) -> Graph:
    """The graph, rewritten so that as many as possible of its outputs `values` are sums or means of those of the
    micro-batches. Outputs with a `reduce` from the user stay as they are."""
    graph = with_named_parts(graph, values, reduce)
    if not graph.parts and all(said(graph, value, reduce) is None for value in values):
        summed = _without_label_means(graph, values)
        if summed is not None and not any(_is_unclear(value, summed) for value in values):
            return with_shares(summed, needed(summed, values))
    found = kinds(graph)

    def is_open(value: str) -> bool:
        return said(graph, value, reduce) is None and _is_unclear(value, graph)

    said_of = {value: how for value in values if (how := said(graph, value, reduce)) in COMBINED}
    unclear = [value for value, how in said_of.items() if found[value].reduce is None]
    if unclear:  # what is said of a sum holds for those of its parts of which nothing is known
        whole = _with_exact_sums(graph, unclear, values)
        split = [value for value in unclear if unknown_parts(whole, value)]
        if split:
            whole = _with_exact_sums(graph, [*split, *filter(is_open, values)], values)
            for value in split:
                whole = with_unknown_parts(whole, value, said_of[value])
            return with_shares(whole, needed(whole, [*split, *filter(is_open, values)]))
    wanted = [value for value in values if is_open(value)]
    if not wanted:
        return graph
    graph = _with_exact_sums(graph, wanted, values)
    return with_shares(graph, needed(graph, wanted))


def _without_label_means(graph: Graph, values: Sequence[str]) -> Graph | None:
    """The graph with exact sums if one of `values` is made of a mean over labels, which is none over samples: so much
    is known before the graph is followed, which takes long. None if there is no such mean."""
    wanted = [value for value in values if not batch_dims(graph.types[value])]
    names, made = needed(graph, wanted), {op.name: op for op in graph.ops}
    losses = (op for op in graph.ops if op.name in names and called(op) in LABEL_LOSSES)
    if any(_divided(op, graph, data_only(graph), made) is not None for op in losses):
        return _with_exact_sums(graph, wanted, values)
    return None


def _is_unclear(value: str, graph: Graph) -> bool:
    """Whether a value is not known to be put together from those of the micro-batches."""
    if follow(graph).mixes(value) is not None:
        return True
    return kinds(graph)[value].reduce is None and not batch_dims(graph.types[value])


def _with_exact_sums(graph: Graph, wanted: Sequence[str], values: Sequence[str]) -> Graph:
    """The graph, where losses that `wanted` are made of are sums over the samples, divided by totals."""
    graph = _with_sums(graph, needed(graph, wanted))
    return _with_totals(graph, needed(graph, wanted), values)


# Losses that divide by how many labels count --------------------------------------------------------------------------


def _with_sums(graph: Graph, names: set[str]) -> Graph:
    """The graph, where losses among `names` that are weighted means are sums divided by totals."""
    known, made = data_only(graph), {op.name: op for op in graph.ops}
    name = Names(graph.types)
    ops: list[Op] = []
    for op in graph.ops:
        ways = (_divided, _over_rows, _with_counted_sizes) if op.name in names else ()
        make = next((found for way in ways if (found := way(op, graph, known, made)) is not None), None)
        ops += make(name) if make is not None else [op]
    return replace(graph, ops=tuple(ops))


def _divided(op: Op, graph: Graph, known: set[str], made: Mapping[str, Op]) -> Callable[[Names], list[Op]] | None:
    """A function that writes a loss as a sum divided by a total; None if that is not needed, or the total does not
    depend on data alone."""
    if called(op) not in LABEL_LOSSES | WEIGHTED_LOSSES or batch_dims(op.type):
        return None
    given = arguments(op)
    if reduction(given) != "mean":
        return None
    if called(op) in WEIGHTED_LOSSES:
        weight = given.get("weight")
        if not isinstance(weight, Ref) or weight.name not in known:
            return None
        return lambda name: Writer(op, graph, name).by_weights(weight)
    if not labels_may_be_ignored(op, graph.types, made):
        return None
    if any(isinstance(given[key], Ref) and given[key].name not in known for key in ("target", "weight")):
        return None
    return lambda name: Writer(op, graph, name).by_labels(given)


def _over_rows(op: Op, graph: Graph, known: set[str], made: Mapping[str, Op]) -> Callable[[Names], list[Op]] | None:
    """A function that writes a mean over rows that a mask selects as a sum divided by a total; None as above."""
    if called(op) not in MEANS or batch_dims(op.type):
        return None
    values = [ref.name for ref in op.args[:2] if isinstance(ref, Ref) and selected(graph.types[ref.name])]
    shapes = {kind.shape for name in values if isinstance(kind := graph.types[name], TensorType)}
    mask = _mask(graph, selected(graph.types[values[0]])) if values else None
    if mask is None or mask not in known or len(shapes) > 1:
        return None
    kind, dims = graph.types[values[0]], None
    assert isinstance(kind, TensorType)
    if called(op) == "mean":
        along = argument(op, 1, "dim")
        along = (along,) if isinstance(along, int) else along
        dims = None if along is None else frozenset(dim % len(kind.shape) for dim in along)
    else:
        given = arguments(op)
        how, weighted = reduction(given), given.get("weight") is not None and called(op) in WEIGHTED_LOSSES
        if how not in ("mean", "batchmean") or weighted:
            return None
        if called(op) in LABEL_LOSSES and (len(kind.shape) != 2 or labels_may_be_ignored(op, graph.types, made)):
            return None
        if how == "batchmean" or called(op) in LABEL_LOSSES | ROW_LOSSES:
            dims = frozenset(batch_dims(kind))
    each = rows_each(kind, dims)
    return None if each is None else lambda name: Writer(op, graph, name).by_rows(mask, each)


def _with_counted_sizes(
    op: Op, graph: Graph, known: set[str], made: Mapping[str, Op]
) -> Callable[[Names], list[Op]] | None:
    """A function that writes a quotient by how many rows a mask selects, `x.sum() / x.shape[0]`, as one by a total."""
    if op_name(op) not in DIVIDE | MULTIPLY or batch_dims(op.type) or not isinstance(op.type, TensorType):
        return None
    sizes = [ref.name for ref in refs(op.args) if isinstance(graph.types[ref.name], ScalarType)]
    if not any(Writer(op, graph, Names(graph.types)).counted(size, known, made) for size in sizes):
        return None

    def write(name: Names) -> list[Op]:
        writer = Writer(op, graph, name)
        found = {size: ops for size in sizes if (ops := writer.counted(size, known, made))}
        args = map_leaves(op.args, lambda leaf: Ref(found[leaf.name][-1].name) if _is_of(leaf, found) else leaf)
        return [*(one for ops in found.values() for one in ops), replace(op, args=args)]

    return write


def _is_of(leaf: Any, found: Mapping[str, list[Op]]) -> bool:
    return isinstance(leaf, Ref) and leaf.name in found


def _mask(graph: Graph, names: frozenset[str]) -> str | None:
    """The mask that selects rows of this name, if there is one and it has an element for each."""
    for op in graph.ops:
        mask = mask_of(op, graph.types)
        if mask is not None and names == selected(op.type) - selected(graph.types[mask]):
            return mask if op_name(op) != "masked_select" or _is_whole(op, graph.types[mask]) else None
    return None


def _is_whole(op: Op, mask: ValueType) -> bool:
    """Whether the mask of a `masked_select` has an element for each that it selects."""
    bounds = {dim.partition("<=")[2] for kind in tensors(op.type) for dim in kind.shape if isinstance(dim, str)}
    return isinstance(mask, TensorType) and bounds == {product(mask.shape)}


@dataclass
class Writer:
    """Writes the ops that replace one loss."""

    op: Op
    graph: Graph
    name: Names

    def _make(self, wish: str, target: Any, args: tuple[Any, ...], kind: TensorType) -> Op:
        return replace(self.op, name=self.name(wish), target=target, args=args, kwargs={}, type=kind)

    def _tensor(self, ref: Ref) -> TensorType:
        kind = self.graph.types[ref.name]
        assert isinstance(kind, TensorType)
        return kind

    def by_labels(self, given: Mapping[str, Any]) -> list[Op]:
        """`loss / counted`, where `counted` are the labels that are not ignored, or the sum of their weights."""
        target, weight = given["target"], given["weight"]
        kind = self._tensor(target)
        ignored = replace(kind, dtype="bool")
        if weight is None:
            count = self._make("counts", operator.ne, (target, given["ignore_index"]), ignored)
            total = self._make("labels_counted", "sum", (Ref(count.name),), replace(kind, dtype="i64", shape=()))
            return [count, total, *self._quotient(Ref(total.name))]
        number = replace(kind, dtype=self._tensor(weight).dtype)
        skip = self._make("ignored", operator.eq, (target, given["ignore_index"]), ignored)
        label = self._make("label", "masked_fill", (target, Ref(skip.name), 0), kind)
        of_label = self._make("label_weight", torch.take, (weight, Ref(label.name)), number)
        counted = self._make("label_weight", "masked_fill", (Ref(of_label.name), Ref(skip.name), 0.0), number)
        total = self._make("label_weights", "sum", (Ref(counted.name),), replace(number, shape=()))
        return [skip, label, of_label, counted, total, *self._quotient(Ref(total.name))]

    def by_weights(self, weight: Ref) -> list[Op]:
        """`loss / weight.sum()`."""
        total = self._make("weights", "sum", (weight,), replace(self._tensor(weight), shape=()))
        return [total, *self._quotient(Ref(total.name))]

    def by_rows(self, mask: str, each: int) -> list[Op]:
        """`loss / rows`, where `rows` are the elements over which it is a mean."""
        counted = self._rows(mask, each)
        if called(self.op) != "mean":
            return [*counted, *self._quotient(Ref(counted[-1].name))]
        whole = self._tensor(Ref(self.op.reads[0]))
        parts = replace(self.op, name=self.name(self.op.name), target=operator.truediv, kwargs={}, type=whole)
        parts = replace(parts, args=(self.op.args[0], Ref(counted[-1].name)))
        summed = "sum" if isinstance(self.op.target, str) else torch.sum
        return [*counted, parts, replace(self.op, target=summed, args=(Ref(parts.name), *self.op.args[1:]))]

    def counted(self, size: str, known: set[str], made: Mapping[str, Op]) -> list[Op]:
        """The ops that compute a number from how many rows a mask selects, as far as data alone tells; else none."""
        op = made.get(size)
        if op is None:
            return []
        if op_name(op) in SIZES and isinstance(op.args[0], Ref):
            kind = self.graph.types[op.args[0].name]
            mask, dim = _mask(self.graph, selected(kind)) if selected(kind) else None, argument(op, 1, "dim")
            each = rows_each(kind, None if dim is None else frozenset({dim % len(kind.shape)})) if mask else None  # type: ignore[union-attr]
            if mask is None or mask not in known or not each:
                return []
            *ops, total = self._rows(mask, each)
            return [*ops, total, replace(op, name=self.name(op.name), target="item", args=(Ref(total.name),))]
        inside = {ref.name: ops for ref in refs(op.args) if (ops := self.counted(ref.name, known, made))}
        if not inside:
            return []
        args = map_leaves(op.args, lambda leaf: Ref(inside[leaf.name][-1].name) if _is_of(leaf, inside) else leaf)
        return [*(one for ops in inside.values() for one in ops), replace(op, name=self.name(op.name), args=args)]

    def _rows(self, mask: str, each: int) -> list[Op]:
        """How many elements there are, of which each row that the mask selects has `each`."""
        kind = replace(self._tensor(Ref(mask)), dtype="i64", shape=(), grad=False)
        rows = self._make("rows", "count_nonzero", (Ref(mask),), kind)
        total = self._make("elements", operator.mul, (Ref(rows.name), each), kind)
        return [rows] if each == 1 else [rows, total]

    def _quotient(self, total: Ref) -> list[Op]:
        """The sum over the samples, divided by the total. In float16, where the sum may overflow, the sum of the
        quotients."""
        op = self.op
        assert callable(op.target)
        assert isinstance(op.type, TensorType)
        defaults = inspect.signature(op.target).parameters
        terms = op.type.dtype == "f16"
        given = arguments(op) | {"size_average": None, "reduce": None, "reduction": "none" if terms else "sum"}
        args = given["input"], given["target"]
        kwargs = {key: defaults[key] for key in list(defaults)[2:]}
        kwargs = {key: given[key] for key, parameter in kwargs.items() if given[key] != parameter.default}
        shape = self._tensor(given["target"]).shape if terms else ()
        kind = replace(op.type, shape=shape)
        loss = replace(op, name=self.name(op.name), args=args, kwargs=kwargs, type=kind)
        quotient = replace(op, target=operator.truediv, args=(Ref(loss.name), total), kwargs={})
        if not terms:
            return [loss, quotient]
        parts = replace(quotient, name=self.name(op.name), type=kind)
        return [loss, parts, replace(op, target="sum", args=(Ref(parts.name),), kwargs={})]


# Numbers over the batch that depend on data alone ---------------------------------------------------------------------


@once
def data_only(graph: Graph) -> set[str]:
    """The values that are computed only from inputs, constants and buffers, without random ops. Parameters are
    excluded, because they have gradients and belong to stages."""
    given = {item.name for item in graph.inputs} | {state.name for state in graph.states}
    barred = given & {name for op in graph.ops for name in op.writes}
    while True:
        known = _data_without(graph, barred)
        spoilt = known & {name for op in graph.ops if op.name not in known for name in op.writes}
        if not spoilt:
            return known
        barred |= spoilt


def _data_without(graph: Graph, barred: set[str]) -> set[str]:
    """The values made of data alone, without `barred`; other ops may still write into some of them."""
    known = {item.name for item in graph.inputs} | {size.name for size in graph.sizes}
    known |= {s.name for s in graph.states if s.kind != "parameter"}
    known -= {i.name for i in graph.inputs if any(kind.grad for kind in tensors(i.type))}
    known -= barred
    for op in graph.ops:
        pure = not op.random and op.name not in barred
        if pure and known.issuperset((*op.reads, *op.writes)) and not any(kind.grad for kind in tensors(op.type)):
            known.add(op.name)
    return known


def _with_totals(graph: Graph, names: set[str], values: Sequence[str]) -> Graph:
    """The graph, where those of `names` that are one value over the batch and depend on data alone are inputs, computed
    by its totals. `values` are its outputs."""
    known = data_only(graph)
    found = kinds(replace(graph, ops=tuple(op for op in graph.ops if op.name in known)))
    plain, written = (SAME, ZERO), {name for op in graph.ops for name in (op.name, *op.writes) if op.writes}
    candidates = known & names - written
    pooled = [op for op in graph.ops if op.name in candidates and found[op.name] not in plain]
    chosen = {op.name: op for op in pooled if isinstance(op.type, TensorType) and not batch_dims(op.type)}
    rest = replace(
        graph,
        inputs=(*graph.inputs, *(Input(name, "", op.type, None) for name, op in chosen.items())),
        ops=tuple(op for op in graph.ops if op.name not in chosen),
        outputs=tuple(Output(value, None) for value in values),
    )
    rest = without_dead_ops(rest)
    # Chosen values that no op reads now were only needed to compute other totals.
    used = set(values).union(*(op.reads for op in rest.ops)) & chosen.keys()
    if not used:
        return graph
    whole = replace(
        graph,
        ops=tuple(op for op in graph.ops if op.name in known),
        outputs=tuple(Output(name, None, "same") for name in chosen if name in used),
        result=tuple(Ref(name) for name in chosen if name in used),
        loss=None,
    )
    inputs = tuple(item for item in rest.inputs if item.path or item.name in used)
    whole = without_dead_ops(whole)
    read = {name for op in whole.ops for name in op.reads}
    whole = replace(whole, states=tuple(state for state in whole.states if state.name in read))
    return replace(rest, inputs=inputs, outputs=(), totals=whole)
