"""What is known about the values of a graph: where they have the batch, and how they depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from fxpipe.errors import CaptureError
from fxpipe.ir.graph.graph import Op, called
from fxpipe.ir.graph.value_types import BATCH, Dim, ValueType, dim_names, dim_size, tensors

from .op_errors import refuse

EXPANDS, REPEATS = {"expand", "expand_as", "broadcast_to"}, {"repeat", "tile"}
CONSTANTS = {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"}
CONSTANTS |= {"empty", "new_empty", "empty_like"}  # to be filled


class Mixes(CaptureError):
    """An op mixes the samples of a batch; `what` says how, in words. `in_order`: it puts rows of samples in their order
    where a mask is true, and only a run tells whether each sample has as many places as rows."""

    def __init__(self, op: Op, what: str, in_order: bool = False) -> None:
        super().__init__(str(refuse(op, what)))
        self.op, self.what, self.in_order = op, what, in_order


@dataclass(frozen=True)
class Sorted:
    """What a value has of keys that were sorted along the batch, or of rows in the order of the sorted keys.

    - `sort`: the error that the sort is where this meets samples in their own order.
    - `many`: how many keys there are.
    - `holds`: "keys", "positions" (where each key was before), or both as "pair"; "places" (where each key is now);
      "rows", one for each key; "counts" of the keys with each value, and "ends", where these end.
    - `each`: what positions have been divided by: so many keys were of one sample.
    """

    sort: Mixes
    many: Dim
    holds: str
    each: int = 1


@dataclass(frozen=True)
class Places:
    """What an index finds along the batch: rows of each sample's own.

    - `each`: how many there are of each sample.
    - `of`: the rows that are counted, if they are those that data selects (`selected_rows.py`).
    """

    each: int
    of: frozenset[str] = frozenset()


class Part(NamedTuple):
    """Rows of samples, `many` of each, in a dimension that has the batch: `block` of the first sample, as many of each
    other, then the next of the first (`sample_order.py`)."""

    many: int
    block: int


@dataclass
class Flow:
    """What is known about each value, by name.

    - `types`: its type.
    - `depends`: the values that depend on the samples.
    - `pooled`: for values without batch dimension that depend on the samples, the op that pooled them.
    - `counted`: for numbers of the samples (`arange`, `randperm`), the op that made them.
    - `places`: for those of them that find each sample's own rows, which rows these are.
    - `order`: for values with samples, the parts of the dimension that has them.
    - `alike`: values of which all rows in that dimension are alike.
    - `begins`: for values of which this is so of the first elements of another dimension, the dimension, from the last,
      and how many.
    - `drawn`: values that are made of random numbers, and not of samples.
    - `mixed`: for values in which samples were mixed, the error.
    - `scaled`: for samples that were computed with the batch size, the error.
    - `vmaps`: for values in a vmap over the batch, the op that entered the vmap.
    - `beside`: for batched values in a vmap over something else, the op that took them there.
    - `sorted`: what a value has of keys that were sorted along the batch.
    - `sizes`: the numbers that depend on the batch size.
    - `made`: the ops, by their values.
    - `equal`: where masks select, for each value the first that is computed in the same way.
    - `masks`: for masks that have selected rows of samples, the name of how many.
    """

    types: Mapping[str, ValueType]
    made: Mapping[str, Op]
    equal: Mapping[str, str]
    depends: set[str] = field(default_factory=set)
    pooled: dict[str, Op] = field(default_factory=dict)
    counted: dict[str, Op] = field(default_factory=dict)
    places: dict[str, Places] = field(default_factory=dict)
    order: dict[str, tuple[Part, ...]] = field(default_factory=dict)
    alike: set[str] = field(default_factory=set)
    begins: dict[str, tuple[int, int]] = field(default_factory=dict)
    drawn: set[str] = field(default_factory=set)
    mixed: dict[str, CaptureError] = field(default_factory=dict)
    scaled: dict[str, Mixes] = field(default_factory=dict)
    vmaps: dict[str, str] = field(default_factory=dict)
    beside: dict[str, Op] = field(default_factory=dict)
    sorted: dict[str, Sorted] = field(default_factory=dict)
    sizes: set[str] = field(default_factory=lambda: {BATCH})
    masks: dict[str, str] = field(default_factory=dict)

    def parts(self, value: str) -> tuple[Part, ...]:
        """The order of the rows of a value with samples."""
        rows = many(self.types[value]) or 1
        return self.order.get(value, (Part(rows, rows),))

    def outer(self, value: str) -> int:
        """How often the rows of a value begin with the first sample again; 1: these are one sample's after
        another's."""
        return sum(part.many // part.block for part in self.parts(value))

    def mixes(self, value: str) -> CaptureError | None:
        """Why a value is another one if the batch is cut, as its samples are mixed or not in their order; or None."""
        sort = self.sorted[value].sort if value in self.sorted and batch_dims(self.types[value]) else None
        return self.mixed.get(value, sort)


@lru_cache(maxsize=4096)
def batch_dims(kind: ValueType) -> tuple[int, ...]:
    """The dimensions of a type that depend on the batch size; for several tensors, those of the first with any."""
    for tensor in tensors(kind):
        if dims := tuple(i for i, size in enumerate(tensor.shape) if BATCH in dim_names(size)):
            return dims
    return ()


@lru_cache(maxsize=4096)
def multiple(size: Dim) -> int | None:
    """The factor between a dimension and the batch size; None if it is not a multiple, as `b - 1`."""
    try:
        one, two, five = (number(size, rows) for rows in (1, 2, 5))
    except ZeroDivisionError:  # 8*b//(b//2)
        return None
    return one if one > 0 and (two, five) == (2 * one, 5 * one) else None


@lru_cache(maxsize=4096)
def many(type: ValueType) -> int | None:
    """The factor between the dimension with the batch and the batch."""
    return next((multiple(kind.shape[dims[0]]) for kind in tensors(type) if (dims := batch_dims(kind))), None)


def returns_what_it_writes(op: Op) -> bool:
    """Whether the op is a method as `x.add_(y)` or an operator as `x += y`. Batch norm, a user's op, and a submodule
    kept whole may write one value and return another."""
    return called(op).endswith("_") or getattr(op.target, "__module__", None) == "_operator"


def number(size: Dim, rows: int = 1) -> int:
    """A dimension as a number, with `rows` for the batch and primes for other names, so that they differ."""
    primes = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)
    values = {name: primes[sum(map(ord, name)) % len(primes)] for name in dim_names(size)}
    return dim_size(size, values | {BATCH: rows})
