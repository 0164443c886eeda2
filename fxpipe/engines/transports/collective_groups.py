"""The process groups for collectives of ranks: a group of torch.distributed for each set of ranks, made once.

A part is a matrix: a row for each rank that its elements go to, or one row for all. What a rank gets has a row for each
rank that it comes from, or one row of sums.

    all-reduce       1 row of the whole      1 row of sums
    reduce-scatter   a slice in each row     1 row of sums; in gloo the slices of all ranks, which are added up here
    all-gather       1 row of a slice        a slice in each row

On CPUs each row ends with three marks, which are added up with it: how many ranks have failed, how many have a part at
all, and of how many it needs a gradient. On accelerators a host would have to wait to read marks: there each rank tells
all others in a message between hosts, as it does beside each value (`message_format.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from fxpipe.ir.program.device_programs import ALL_GATHER, ALL_REDUCE, COLLECTIVES, REDUCE_SCATTER
from fxpipe.torch_internals.process_groups import all_gather, backend_group, reduce_scatter

from .communicators import Call, settings
from .message_format import FailedElsewhere, Size

Marks = tuple[bool, bool, bool]  # whether its rank has failed, there is a part, and it needs a gradient
FAILED_PART: Marks = True, False, False
CHANNELS_LAST = [0, 2, 3, 1], [0, 2, 3, 4, 1]


class CollectiveGroups:
    """The groups of one rank, by their ranks. `adds_here`: whether a reduce-scatter is an all-to-all and a local sum:
    that of gloo is an all-reduce inside, which moves twice as much."""

    def __init__(self, backend: str, store: Any, rank: int, device: torch.device, limit: timedelta) -> None:
        self.backend, self.store, self.rank, self.device, self.limit = backend, store, rank, device, limit
        self.adds_here = backend == "gloo"
        self.groups: dict[tuple[int, ...], Any] = {}

    def make(self, wanted: Iterable[tuple[int, ...]]) -> list[Call]:
        """Make the groups that this rank is in and that are not there yet, and use each once for each collective, as
        the first use blocks the host until all come. All ranks give the same groups in the same order. Returns the
        calls to wait for. Raises RuntimeError."""
        calls = []
        for ranks in wanted:
            if self.rank not in ranks or ranks in self.groups:
                continue
            store = PrefixStore("collectives/" + "-".join(map(str, ranks)), self.store)
            with settings():
                made = backend_group(self.backend, store, ranks.index(self.rank), len(ranks), self.limit)
            self.groups[ranks] = made
            for kind in COLLECTIVES:
                part = torch.zeros(len(ranks) if kind == REDUCE_SCATTER else 1, 1, device=self.device)
                calls.append(self.begin(kind, ranks, part, self.space(kind, part, ranks), self.limit))
        return calls

    def space(self, kind: str, part: Tensor, ranks: Sequence[int]) -> Tensor:
        """Memory for what a collective makes of parts like this one; an all-reduce replaces the part."""
        if kind == ALL_REDUCE:
            return part
        rows = len(ranks) if kind == ALL_GATHER or self.adds_here else 1
        return part.new_empty(rows, part.shape[1])

    def begin(self, kind: str, ranks: tuple[int, ...], part: Tensor, found: Tensor, limit: timedelta) -> Call:
        """Begin a collective of these ranks, from the rows of `part` into those of `found`. Sums are the same on all
        ranks, to the last bit. Raises RuntimeError."""
        group = self.groups[ranks]
        other = next(rank for rank in ranks if rank != self.rank)
        options: Any
        if kind == ALL_REDUCE:
            options = dist.AllreduceOptions()
            options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.SUM), limit
            work = group.allreduce([found], options)
        elif kind == ALL_GATHER:
            work = all_gather(group, found.view(-1), part.view(-1), limit)
        elif self.adds_here:
            options = dist.AllToAllOptions()
            options.timeout = limit
            work = group.alltoall_base(found, part, [], [], options)
        else:
            work = reduce_scatter(group, found.view(-1), part.view(-1), limit)
        return Call(True, other, found, work, ranks=ranks, part=part)

    def abort(self) -> None:
        """End all calls with an error, where the backend can. The groups cannot be used again."""
        for group in self.groups.values():
            with suppress(RuntimeError):
                group.abort()


# Parts ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one rank gives to a collective, and gets from it.

    - `kind`: the collective; `count`: of how many ranks; `dim`: the dimension of slices.
    - `given`, `taken`: the type and shape of the rank's part, and of what it gets.
    - `marked`: whether rows end with marks.
    """

    kind: str
    count: int
    dim: int
    given: Size
    taken: Size
    marked: bool

    @property
    def row(self) -> int:
        """The number of elements of a row, without marks."""
        return prod(self.given[1]) // (self.count if self.kind == REDUCE_SCATTER else 1)

    def slices(self, value: Tensor) -> Tensor:
        """A whole value, with its slices along a new first dimension."""
        shape, dim = value.shape, self.dim
        return value.reshape(*shape[:dim], self.count, shape[dim] // self.count, *shape[dim + 1 :]).movedim(dim, 0)

    def part(self, value: Tensor | None, device: torch.device) -> Tensor:
        """The rows of a part, with zeros as marks: in new memory, or that of the value where nothing is written to it;
        zeros without a part. Raises ValueError if its type or shape is not `given`."""
        dtype, shape = self.given
        if value is not None and (value.dtype, value.shape) != self.given:
            raise ValueError(
                f"a part of type {value.dtype} and shape {list(value.shape)} is to be added up or joined with those of "
                f"other ranks, where {dtype} and {list(shape)} is expected: its type or shape depends on the data"
            )
        rows = value if value is None else self.slices(value) if self.kind == REDUCE_SCATTER else value.unsqueeze(0)
        if rows is not None and not self.marked and self.kind != ALL_REDUCE:
            return rows.contiguous().view(-1, self.row)
        count = self.count if self.kind == REDUCE_SCATTER else 1
        flat = torch.zeros(count, self.row + len(FAILED_PART) * self.marked, dtype=dtype, device=device)
        if rows is not None:
            flat[:, : self.row].view(rows.shape).copy_(rows)
        return flat

    def opened(self, found: Tensor, marks: Marks, order: Sequence[int]) -> Tensor | None:
        """What a rank gets, a leaf that needs a gradient if a part did, or None if there are no parts. Its dimensions
        have this order in memory, from the largest stride on; () for a contiguous one. Raises FailedElsewhere if a rank
        has failed."""
        failed, there, grad = marks
        if failed:
            raise FailedElsewhere
        if not there:
            return None
        rows, (_, shape) = found[:, : self.row], self.taken
        if self.kind == ALL_GATHER:
            value = rows.view(self.count, *self.given[1]).movedim(0, self.dim).reshape(shape)
        else:
            value = (rows if len(rows) == 1 else rows.sum(0)).reshape(shape)
        if order and (self.kind != ALL_GATHER or order in CHANNELS_LAST):
            value = value.permute(*order).contiguous().permute(sorted(range(len(order)), key=order.__getitem__))
        return value.requires_grad_() if grad else value


def mark(part: Tensor, marks: Marks) -> None:
    """Write marks behind each row of a part."""
    for at, one in enumerate(marks, part.shape[1] - len(marks)):
        if one:
            part[:, at] = 1


def marks_of(found: Tensor) -> Marks:
    """The marks behind what a rank gets: whether those of any part are set."""
    failed, there, grad = found[:, -len(FAILED_PART) :].sum(0).tolist()
    return failed > 0, there > 0, grad > 0
