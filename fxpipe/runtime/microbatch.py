"""Cut a mini-batch into micro-batches, and put the outputs together again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fxpipe.errors import InputError


class MicroBatch:
    """The values of one micro-batch during a run, as attributes under the model's names."""

    if TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the micro-batch has no {name!r} (yet, or any more)")


def split_sizes(size: int, chunks: int) -> tuple[int, ...]:
    """Sizes of min(chunks, size) micro-batches, at least one, as even as possible, the larger ones first.

    >>> split_sizes(8, 3), split_sizes(2, 4), split_sizes(0, 4)
    ((3, 3, 2), (1, 1), (0,))
    """
    count = max(1, min(chunks, size))
    small, larger = divmod(size, count)
    return (small + 1,) * larger + (small,) * (count - larger)


def scatter(value: Any, dim: int | None, sizes: Sequence[int]) -> Sequence[Any]:
    """A value for each micro-batch: pieces of the given sizes along `dim`, or the whole for each if `dim` is None.

    Pieces along an inner dimension of a contiguous tensor are copied: the model may rely on contiguous memory.
    """
    if dim is None or len(sizes) == 1:
        return [value] * len(sizes)
    pieces: Sequence[Tensor] = value.split(list(sizes), dim)
    return [piece.contiguous() for piece in pieces] if dim != 0 and value.is_contiguous() else pieces


def checked_places(mask: Tensor, rows: Tensor, of: Tensor | None) -> Tensor:
    """The mask, which says where the rows of a micro-batch are put: their elements, in the tensor `of`, or whole rows.
    Samples with as many places as rows get their own. Raises InputError if there are more of one."""
    spread = [dim for dim, step in enumerate(mask.stride()) if step == 0]  # in which it repeats itself
    counted = mask[tuple(slice(1) if dim in spread else slice(None) for dim in range(mask.dim()))]
    repeats = (mask if of is None else of).numel() // max(1, counted.numel())
    places, wanted = int(counted.count_nonzero()) * repeats, rows.shape[0] if of is None else rows.numel()
    if places != wanted:
        raise InputError(
            f"a mask has {places} places, and {wanted} values of a micro-batch's samples are put there, so that in the "
            "whole batch samples would get values of others; give each sample as many places as values, or write "
            "chunks=1"
        )
    return mask


def overlaps(here: Sequence[int], there: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The pieces (from slice, to slice, samples), in order, that turn slices of sizes `here` into slices `there`.

    >>> list(overlaps((3, 2), (2, 2, 1)))
    [(0, 0, 2), (0, 1, 1), (1, 1, 1), (1, 2, 1)]
    """
    ends, goals = list(accumulate(here)), list(accumulate(there))
    if not ends[-1]:
        yield 0, 0, 0
    at = 0
    for end in sorted({*ends, *goals}):
        if end > at:
            yield bisect_left(ends, end), bisect_left(goals, end), end - at
        at = end


def join(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """Join pieces of a tensor along `dim`. The result has the pieces' order of dimensions in memory, on which the model
    may rely when it takes views."""
    order = sorted(range(pieces[0].dim()), key=pieces[0].stride, reverse=True)
    whole = torch.cat([piece.permute(order) for piece in pieces], order.index(dim))
    return whole.permute(sorted(range(len(order)), key=order.__getitem__))


def gather(values: Sequence[Any], dim: int | None, reduce: str | None, sizes: Sequence[int]) -> Any:
    """The mini-batch's value from the micro-batches' values: concatenated along `dim`, or, if that is None, reduced by
    `reduce`: "mean" (weighted by `sizes`), "sum", or "same" (the first). Raises ValueError for another `reduce`.

    >>> gather([1.0, 4.0], None, "mean", (2, 1))
    2.0
    """
    if len(values) == 1 or reduce == "same":
        return values[0]
    if dim is not None:
        return torch.cat(list(values), dim)
    if reduce == "sum":
        return _sum(values)
    if reduce != "mean":
        raise ValueError(
            f"nothing says how the numbers of {len(values)} micro-batches become one: reduce is {reduce!r}"
        )
    total = max(1, sum(sizes))
    shares = [size / total for size in sizes]
    if isinstance(values[0], Tensor) and values[0].dtype in (torch.float32, torch.float64):  # a few ops for all
        whole = torch.stack(tuple(values))
        if shares[0] == shares[-1]:
            return whole.mean(0)
        weights = torch.tensor(shares, dtype=whole.dtype, device=whole.device)
        return (whole * weights.view(-1, *[1] * values[0].dim())).sum(0)
    return _sum([value * share for value, share in zip(values, shares, strict=True)])


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.stack(list(values)).sum(0)
    return sum(values)
