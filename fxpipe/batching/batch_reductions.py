"""Which numbers over a batch are sums or means over its samples, so that they can be computed from those of the
micro-batches.

For every value its kind is found: how it depends on the samples, and a power of their number B:

    x                        samples   B^0     one value for each sample
    x.sum()                  pooled    B^1     a sum over the samples
    x.mean()                 pooled    B^0     a mean over the samples, each of the same weight
    x.sum() / x.shape[0]     pooled    B^0     x.shape[0] is the "same" for all samples, with B^1
    w.square().sum()         same      B^0
    x.mean() + w.norm()      pooled    B^0     a mean of what has the same thing added to each
    x.sum() + w.norm()       unknown           w.norm() would be counted once for each micro-batch
    x.mean().sqrt()          unknown           a mean of roots is no root of a mean

Products add the powers, quotients subtract them, sums need equal powers. Pooled values stay pooled only under linear
ops. Any op may be applied to values that are the same, and to samples, which `batch_dimension.py` checks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from fxpipe.ir.graph.graph import Graph, Op, Ref, called, op_name, refs
from fxpipe.ir.graph.op_arguments import arguments
from fxpipe.ir.graph.ops import (
    ADD,
    DIVIDE,
    ELEMENTWISE_LOSSES,
    INDEXING,
    JOINS,
    LABEL_LOSSES,
    LIKE,
    LINEAR,
    MATMULS,
    MULTIPLY,
    ROW_LOSSES,
    SIZES,
    WEIGHTED_LOSSES,
    ZEROS,
)
from fxpipe.ir.graph.value_types import (
    BATCH,
    VMAP,
    ScalarType,
    TensorType,
    TupleType,
    ValueType,
    dim_names,
    in_vmap,
    tensors,
)
from fxpipe.ir.once import once

from .batch_dimension import follow
from .batch_facts import batch_dims, multiple, returns_what_it_writes
from .selected_rows import selected

SUMS = {"sum": 1, "nansum": 1, "count_nonzero": 1, "mean": 0}  # what they add to the power
ROWS = "it is a mean over rows that data selects, of which samples have different numbers"
COUNTS = "it is made of the numbers of the samples, which each micro-batch counts from 0"
PAIRS = "it is made of pairs of samples, or of parts of the batch"


@dataclass(frozen=True)
class Kind:
    """How a value depends on the samples.

    - `what`: "zero", "same", "samples", "pooled" or "unknown".
    - `power`: the power of the number of samples.
    - `blame`: for "unknown", the op that made it so; `why` may say more.
    """

    what: str
    power: int = 0
    blame: Op | None = None
    why: str = ""

    @property
    def reduce(self) -> str | None:
        """How the values of micro-batches are combined: "same", "mean" or "sum"; None if not known."""
        if self.what == "zero" or (self.what, self.power) == ("same", 0):
            return "same"
        return {0: "mean", 1: "sum"}.get(self.power) if self.what in ("pooled", "same") and self.power >= 0 else None


ZERO, SAME, SAMPLES = Kind("zero"), Kind("same"), Kind("samples")
ORDER = ("zero", "same", "samples", "pooled", "unknown")


@once
def kinds(graph: Graph) -> Mapping[str, Kind]:
    """The kind of every value."""
    flow = follow(graph)
    known = {item.name: SAME if item.batch_dim is None else SAMPLES for item in graph.inputs}
    known |= {size.name: Kind("same", int(size.name == BATCH)) for size in graph.sizes}
    known |= {state.name: SAME for state in graph.states}
    states = {state.name for state in graph.states}
    meant = {name: Kind("pooled", SUMS[how]) for name, how in graph.parts}
    for op in graph.ops:
        kind = Follow(op, known, flow.types, flow.made).kind()
        if (op.name in flow.mixed or op.name in flow.sorted) and batch_dims(op.type):  # but one value for each sample
            kind = SAMPLES if one_each(op.type) else Kind("unknown", blame=op, why=PAIRS)
        elif kind.what == "pooled" and op_name(op) not in INDEXING and flow.counted.keys() & set(op.reads):
            numbers = next(flow.counted[name] for name in op.reads if name in flow.counted)
            kind = Kind("unknown", blame=numbers, why=COUNTS)
        elif op.writes and states.issuperset(op.writes) and returns_what_it_writes(op):
            kind = SAME  # statistics of each micro-batch
        known[op.name] = kind = meant.get(op.name, kind)
        # The written value has the op's name from here on. Other values in that memory have the same kind, or unknown.
        for name in set(op.writes) - states - set(op.reads[:1]):
            if known[name] != kind and (known[name].what, kind.what) != ("samples", "samples"):
                known[name] = Kind("unknown", blame=op)
    return known


def one_each(type: ValueType) -> bool:
    """Whether each tensor has no batch dimension, or exactly one, which has the whole batch."""
    dims = ((kind, batch_dims(kind)) for kind in tensors(type))
    return all(not at or (len(at) == 1 and multiple(kind.shape[at[0]]) is not None) for kind, at in dims)


def kind_of(arg: Any, known: Mapping[str, Kind]) -> Kind:
    """The kind of an argument; for a nest, the least certain kind in it."""
    if isinstance(arg, Ref):
        return known[arg.name]
    inside = [known[ref.name] for ref in refs(arg)]
    if inside:
        return max(inside, key=lambda kind: (ORDER.index(kind.what), abs(kind.power)))
    return ZERO if type(arg) in (int, float) and arg == 0 else SAME


def summands(op: Op) -> tuple[Any, ...]:
    """The arguments that an op adds up, joins or selects from."""
    name = called(op).rstrip("_")
    if name in JOINS:
        return tuple(refs((op.args[:1], dict(op.kwargs))))
    return op.args[:2] if name in ADD else op.args[1:3] if name == "where" else ()


def is_number(type: ValueType) -> bool:
    """Whether the value is a number or a tuple of numbers, such as a shape."""
    return all(map(is_number, type.items)) if isinstance(type, TupleType) else isinstance(type, ScalarType)


def labels_may_be_ignored(op: Op, types: Mapping[str, ValueType], made: Mapping[str, Op]) -> bool:
    """Whether samples may differ in weight in the mean of a label loss: labels may be weighted or ignored."""
    given = arguments(op)
    target = given.get("target")
    kind = types.get(target.name) if isinstance(target, Ref) else None
    if isinstance(kind, TensorType) and kind.dtype.startswith(("f", "bf")):
        return False  # probabilities
    source = made.get(target.name) if isinstance(target, Ref) else None
    return given.get("weight") is not None or source is None or called(source) != "argmax"


def reduction(given: Mapping[str, Any]) -> str:
    """The `reduction` of a loss, also from the deprecated arguments `size_average` and `reduce`."""
    average, old = given.get("size_average"), given.get("reduce")
    if average is not None or old is not None:
        return "none" if old is False else "sum" if average is False else "mean"
    return str(given["reduction"])


@dataclass
class Follow:
    """One op, with the kinds of the values before it."""

    op: Op
    known: Mapping[str, Kind]
    types: Mapping[str, ValueType]
    made: Mapping[str, Op]

    def kind(self) -> Kind:
        """The kind of the op's result."""
        op, name = self.op, called(self.op).rstrip("_")
        arithmetic = name in ADD | MULTIPLY | DIVIDE
        if name in LIKE and not op.random and not batch_dims(op.type):  # reads only the sizes of its first argument
            return ZERO if name in ZEROS else self._of((*op.args[1:], *op.kwargs.values()))
        # Number arguments of other ops are mostly shapes, and a vmap that an op is in is no value.
        values = [ref for ref in op.reads if self.types[ref] != VMAP]
        read = [self.known[ref] for ref in values if arithmetic or not is_number(self.types[ref])]
        unknown = next((kind for kind in read if kind.what == "unknown"), None)
        if unknown is not None:
            return unknown
        if name in SIZES and isinstance(op.type, ScalarType):
            return self._size(name)
        if op.type == VMAP:
            return SAME
        if name in ZEROS and not batch_dims(op.type):
            return ZERO
        read_all = [self.known[ref] for ref in op.reads]
        if all(kind.what in ("zero", "same") and kind.power == 0 for kind in read_all) and not batch_dims(op.type):
            return ZERO if name in LINEAR and op.args and self._of(op.args[0]) == ZERO else SAME
        if arithmetic:
            return self._arithmetic(name)
        if name in JOINS or (name == "where" and len(op.args) == 3 and self._of(op.args[0]).what == "same"):
            return self._sum([self._of(arg) for arg in summands(op)])
        if batch_dims(op.type) or in_vmap(op.type):
            return self._samples(name, read)
        return self._pooled(name)

    def unknown(self, why: str = "") -> Kind:
        return Kind("unknown", blame=self.op, why=why)

    def _of(self, arg: Any) -> Kind:
        return kind_of(arg, self.known)

    def _size(self, name: str) -> Kind:
        """A number made of the sizes of a tensor."""
        first = self.op.args[0]
        type = self.types[first.name] if isinstance(first, Ref) else None
        if not isinstance(type, TensorType):
            return self.unknown()
        sizes = type.shape
        if name not in ("numel", "sym_numel"):
            dim = self.op.args[1] if len(self.op.args) > 1 else self.op.kwargs.get("dim")
            if not isinstance(dim, int):
                return self.unknown()
            sizes = (type.shape[dim],)
        of_batch = [size for size in sizes if not isinstance(size, int) and BATCH in dim_names(size)]
        if any(multiple(size) is None for size in of_batch):
            return self.unknown()
        return Kind("pooled" if selected(type) else "same", len(of_batch))

    def _sum(self, parts: Sequence[Kind]) -> Kind:
        """The kind of a sum, or of another op that treats its parts alike."""
        parts = [part for part in parts if part.what != "zero"]
        if not parts:
            return ZERO
        what = max((part.what for part in parts), key=ORDER.index)
        if len({part.power for part in parts}) > 1 or {"samples", "pooled"} <= {part.what for part in parts}:
            return self.unknown("it adds a sum over the samples to what is none" if what == "pooled" else "")
        return Kind(what, parts[0].power)

    def _product(self, one: Kind, other: Kind) -> Kind:
        if "zero" in (one.what, other.what):
            return ZERO
        what = {one.what, other.what}
        if "pooled" in what and what != {"pooled", "same"}:
            return self.unknown("it multiplies two values over the batch")
        return Kind(max(what, key=ORDER.index), one.power + other.power)

    def _arithmetic(self, name: str) -> Kind:
        op = self.op
        if len(op.args) < 2 or not self._plain(op.kwargs):
            read = [self.known[ref] for ref in op.reads]
            return self._samples(name, read) if batch_dims(op.type) and name not in LINEAR else self.unknown()
        one, other = self._of(op.args[0]), self._of(op.args[1])
        if name in ADD:
            return self._sum([one, other])
        if name in MULTIPLY:
            return self._product(one, other)
        if one.what == "zero":
            return ZERO
        if other.what == "pooled" or (one.what == "pooled" and other.what == "samples"):
            return self.unknown("it divides by a value over the batch")
        return Kind(max((one.what, other.what), key=ORDER.index), one.power - other.power)

    @staticmethod
    def _plain(kwargs: Mapping[str, Any]) -> bool:
        """Whether the keyword arguments do not change the kind."""
        number = isinstance(kwargs.get("alpha", 1), (int, float))
        return kwargs.keys() <= {"alpha", "rounding_mode"} and kwargs.get("rounding_mode") is None and number

    def _samples(self, name: str, read: Sequence[Kind]) -> Kind:
        """The kind of a result with a batch dimension."""
        if all(kind.power == 0 for kind in read):
            return SAMPLES
        if name in LINEAR and len({kind.power for kind in read}) == 1:
            return Kind("samples", read[0].power)
        return self.unknown()

    def _pooled(self, name: str) -> Kind:
        """The kind of a result without batch dimension that depends on the samples."""
        op = self.op
        first = self._of(op.args[0]) if op.args else self._of(op.kwargs.get("input", ()))
        rest = [self._of(arg) for arg in (*op.args[1:], *op.kwargs.values())]
        alone = all(kind.what in ("zero", "same") for kind in rest)
        if first.what == "samples" and name in SUMS and alone:
            if name == "count_nonzero" and first.power:
                return self.unknown()
            if name == "mean" and selected(self.types[op.reads[0]]):
                return self.unknown(ROWS)
            return Kind("pooled", first.power + SUMS[name])
        if first.what != "samples" and name in LINEAR and alone:
            return first if self._keeps_fractions(op) else self.unknown()
        if name in ELEMENTWISE_LOSSES | ROW_LOSSES | LABEL_LOSSES:
            return self._loss(name)
        if name == "ctc_loss":
            return self._of_sequences()
        if name in MATMULS or name == "einsum":
            return self._contraction(name)
        return self.unknown()

    def _keeps_fractions(self, op: Op) -> bool:
        """Whether the op does not round: its result is not integer, unless its argument is; and is not bool."""
        before = self.types[op.reads[0]]
        whole = [isinstance(kind, TensorType) and kind.dtype[0] in "iu" for kind in (before, op.type)]
        truth = isinstance(op.type, TensorType) and op.type.dtype == "bool"
        return not truth and (whole[0] or not whole[1])

    def _loss(self, name: str) -> Kind:
        """One of torch's losses, reduced to a number."""
        given = arguments(self.op)
        how = reduction(given)
        values = {key: value.name for key, value in given.items() if isinstance(value, Ref)}
        read = {key: self.known[value] for key, value in values.items()}
        if any(kind.what == "pooled" or kind.power for kind in read.values()):
            return self.unknown()
        types = {key: self.types[value] for key, value in values.items() if read[key].what == "samples"}
        if how != "sum" and any(map(selected, types.values())):
            return self.unknown(ROWS)
        apart = [
            (dims[0], type) for type in types.values() if (dims := batch_dims(type)) and isinstance(type, TensorType)
        ]
        if name in ELEMENTWISE_LOSSES and len({dim - len(type.shape) for dim, type in apart}) > 1:
            return self.unknown("its arguments are broadcast, so that every sample meets every other")
        if name in ROW_LOSSES and any(dim for dim, _ in apart):
            return self.unknown("the batch is not the first dimension")
        if name in LABEL_LOSSES and any(dim == min(1, len(type.shape) - 1) for dim, type in apart[:1]):
            return self.unknown("its classes run along the batch")
        if how == "batchmean" and "input" in types:
            return Kind("pooled", int(apart[0][0] != 0))
        if how == "mean" and name in WEIGHTED_LOSSES and given.get("weight") is not None:
            return self.unknown("it divides by the sum of the weights, which differs between micro-batches")
        if how == "batchmean":
            return self.unknown()
        if how == "mean" and name in LABEL_LOSSES and labels_may_be_ignored(self.op, self.types, self.made):
            return self.unknown("labels that are ignored, or weighted, differ between micro-batches")
        return Kind("pooled", int(how == "sum"))

    def _of_sequences(self) -> Kind:
        """A CTC loss, reduced to a number: a sum or mean over the sequences, along the second dimension of the first
        argument and the first of the others."""
        given, places = arguments(self.op), {"log_probs": 1}
        for key in ("log_probs", "targets", "input_lengths", "target_lengths"):
            value = given[key]
            if not isinstance(value, Ref) or self.known[value.name] != SAMPLES:
                return self.unknown("its lengths, or other arguments, are the same for all samples")
            if batch_dims(self.types[value.name]) != (places.get(key, 0),):
                return self.unknown("the batch is not the dimension of the sequences")
        return Kind("pooled", int(reduction(given) == "sum"))

    def _contraction(self, name: str) -> Kind:
        """A product of tensors that sums over the batch."""
        op = self.op
        operands = [ref.name for ref in refs((op.args, dict(op.kwargs)))]
        read = [self.known[operand] for operand in operands]
        product = reduce(self._product, read)
        if product.what != "samples":
            linear = name != "linear" or len(operands) < 3 or product.power == 0
            return product if linear else self.unknown()
        if name == "linear" or any(kind.what != "samples" for kind in read):
            return self.unknown()
        shapes = [type.shape for operand in operands for type in tensors(self.types[operand])]
        dims = [dims[0] for operand in operands if (dims := batch_dims(self.types[operand]))]
        if name == "einsum":
            letters = re.sub(r"\s", "", str(op.args[0])).split("->")[0].split(",")
            if "." in "".join(letters) or len({term[dim] for term, dim in zip(letters, dims, strict=True)}) > 1:
                return self.unknown()
        else:
            last = [len(shape) - 1 for shape in shapes]
            second = last[1] if name == "inner" else max(last[1] - 1, 0)
            if dims != [last[0], second]:
                return self.unknown()
        return Kind("pooled", product.power + 1)
