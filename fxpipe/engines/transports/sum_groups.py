"""The process groups over which ranks add up parts of a sum: a group of torch.distributed for each set of ranks, made
once.

On CPUs a part goes with three marks behind it, which are added up with it: how many ranks have failed, how many have a
part at all, and of how many it needs a gradient. On accelerators a host would have to wait to read marks: there each
rank tells all others in a message between hosts, as it does beside each value (`message_format.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .communicators import Call, new_group, settings
from .message_format import FailedElsewhere, Size

Marks = tuple[bool, bool, bool]  # whether its rank has failed, there is a part, and it needs a gradient
FAILED_PART: Marks = True, False, False


class SumGroups:
    """The groups of one rank, by their ranks."""

    def __init__(self, backend: str, store: Any, rank: int, device: torch.device, limit: timedelta) -> None:
        self.backend, self.store, self.rank, self.device, self.limit = backend, store, rank, device, limit
        self.groups: dict[tuple[int, ...], Any] = {}

    def make(self, wanted: Iterable[tuple[int, ...]]) -> list[Call]:
        """Make the groups that this rank is in and that are not there yet, and use each once, as the first use blocks
        the host until all come. All ranks give the same groups in the same order. Returns the calls to wait for.
        Raises RuntimeError."""
        c10d: Any = dist.distributed_c10d
        calls = []
        for ranks in wanted:
            if self.rank not in ranks or ranks in self.groups:
                continue
            store = c10d.PrefixStore("sum/" + "-".join(map(str, ranks)), self.store)
            with settings():
                made = new_group(self.backend, store, ranks.index(self.rank), len(ranks), self.limit)
            self.groups[ranks] = made
            calls.append(self.add_up(ranks, torch.zeros(1, device=self.device), self.limit))
        return calls

    def add_up(self, ranks: tuple[int, ...], flat: Tensor, limit: timedelta) -> Call:
        """Begin to replace a flat tensor by the sum of those of all these ranks, which is the same on all, to the last
        bit. Raises RuntimeError."""
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.SUM), limit
        other = next(rank for rank in ranks if rank != self.rank)
        return Call(True, other, flat, self.groups[ranks].allreduce([flat], options), ranks=ranks)

    def abort(self) -> None:
        """End all calls with an error, where the backend can. The groups cannot be used again."""
        for group in self.groups.values():
            with suppress(RuntimeError):
                group.abort()


# Parts ----------------------------------------------------------------------------------------------------------------


def flat_part(value: Tensor | None, size: Size, device: torch.device) -> Tensor:
    """The elements of a part, with zeros as marks, in new memory; zeros without a part. Raises ValueError if its type
    or shape is not `size`."""
    dtype, shape = size
    flat = torch.zeros(prod(shape) + len(FAILED_PART), dtype=dtype, device=device)
    if value is not None:
        if (value.dtype, value.shape) != size:
            raise ValueError(
                f"a part of a sum of type {value.dtype} and shape {list(value.shape)} is to be added up with those of "
                f"other ranks, where {dtype} and {list(shape)} is expected: its type or shape depends on the data"
            )
        flat[: prod(shape)].view(shape).copy_(value)
    return flat


def mark(flat: Tensor, marks: Marks) -> None:
    """Write marks behind a part."""
    for at, one in enumerate(marks, flat.numel() - len(marks)):
        if one:
            flat[at] = 1


def marks_of(flat: Tensor) -> Marks:
    """The marks behind a sum: whether those of any part are set."""
    failed, there, grad = flat[-len(FAILED_PART) :].tolist()
    return failed > 0, there > 0, grad > 0


def sum_in(flat: Tensor, size: Size, marks: Marks, order: Sequence[int]) -> Tensor | None:
    """The sum, a leaf that needs a gradient if a part did, or None if there are no parts. Its dimensions have this
    order in memory, from the largest stride on; () for a contiguous one. Raises FailedElsewhere if a rank has
    failed."""
    failed, there, grad = marks
    if failed:
        raise FailedElsewhere
    if not there:
        return None
    found = flat[: prod(size[1])].view(size[1])
    if order:
        found = found.permute(*order).contiguous().permute(sorted(range(len(order)), key=order.__getitem__))
    return found.requires_grad_() if grad else found
