"""Cut a mini-batch into micro-batches, and put the outputs together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor


class MicroBatch:
    """The values of one micro-batch while it is under way, as attributes under the model's names."""

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
    """A value for each micro-batch: pieces along `dim`, or with `dim` None the whole for each.

    Pieces along an inner dimension of a contiguous tensor are copied: the model may take them for contiguous too.
    """
    if dim is None or len(sizes) == 1:
        return [value] * len(sizes)
    pieces: Sequence[Tensor] = value.split(list(sizes), dim)
    return [piece.contiguous() for piece in pieces] if dim != 0 and value.is_contiguous() else pieces


def gather(values: Sequence[Any], dim: int | None, reduce: str | None, sizes: Sequence[int]) -> Any:
    """The mini-batch's value from those of the micro-batches: concatenated along `dim`, or as `reduce` says.

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
    return _sum([value * (size / total) for value, size in zip(values, sizes, strict=True)])


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Tensor):
        return torch.stack(list(values)).sum(0)
    return sum(values)
