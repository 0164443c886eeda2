"""Batch norm whose running statistics are those of the whole mini-batch.

Each micro-batch is normalised by its own mean and variance, as the pipeline must. But running statistics updated once
per micro-batch are not those of the model on the mini-batch: they decay too fast and see too little. So forward adds
up sums, and the end of the run commits them, once, with the momentum of one mini-batch.

Sums are kept by the buffer they belong to. A recomputation has scratch buffers, whose sums nobody commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .stage import Stage


@dataclass
class Sums:
    """What the micro-batches so far add up to."""

    count: int
    total: Tensor
    squares: Tensor
    running_var: Tensor | None
    batches: Tensor | None
    momentum: float | None


_pending: Any = WeakIdKeyDictionary()  # Tensor -> Sums; Any, because torch leaves it untyped


def deferred_batch_norm(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | None,
    eps: float,
) -> Tensor:
    """Batch norm in training, with the running statistics left to `commit`. It counts in `num_batches_tracked` too;
    `momentum` None averages over all mini-batches counted there."""
    _add(input.detach(), running_mean, running_var, momentum, num_batches_tracked)
    return F.batch_norm(input, None, None, weight, bias, True, 0.0, eps)


def commit(stages: Iterable[Stage]) -> None:
    """The mini-batch is over: update the running statistics of the stages."""
    for stage in stages:
        for path in stage.mutates:
            sums: Sums | None = _pending.pop(stage.tensor(path), None)
            if sums is not None:
                _update(stage.tensor(path), sums)


def sums_of(stage: Stage) -> dict[str, Sums]:
    """Take what a replica of a stage has seen, by the path of the buffer, for `absorb`."""
    taken = {path: _pending.pop(stage.tensor(path), None) for path in stage.mutates}
    return {path: replace(sums, running_var=None, batches=None) for path, sums in taken.items() if sums is not None}


def absorb(stage: Stage, more: Mapping[str, Sums]) -> None:
    """Add the sums of a replica of the stage, over samples of the same batch, to the stage's own."""
    for path, seen in more.items():
        sums: Sums | None = _pending.get(stage.tensor(path))
        if sums is not None:
            sums.count += seen.count
            sums.total += seen.total.to(sums.total.device)
            sums.squares += seen.squares.to(sums.squares.device)


def discard(stages: Iterable[Stage]) -> None:
    """The mini-batch failed: forget its sums."""
    for stage in stages:
        for path in stage.mutates:
            _pending.pop(stage.tensor(path), None)


def _add(x: Tensor, mean: Tensor, var: Tensor | None, momentum: float | None, batches: Tensor | None) -> None:
    dims = [dim for dim in range(x.dim()) if dim != 1]
    wide = x.to(torch.promote_types(mean.dtype, torch.float32))  # sums of halves overflow
    # Shifted by the running mean, which loses nothing where the mean is large beside the deviation.
    shifted = wide - mean.detach().view([-1 if dim == 1 else 1 for dim in range(x.dim())])
    total, squares = shifted.sum(dims), shifted.square().sum(dims)
    before: Sums | None = _pending.get(mean)
    if before is None:
        _pending[mean] = Sums(x.numel() // x.shape[1], total, squares, var, batches, momentum)
        return
    before.count += x.numel() // x.shape[1]
    before.total += total
    before.squares += squares


@torch.no_grad()
def _update(running_mean: Tensor, sums: Sums) -> None:
    if sums.batches is not None:
        sums.batches.add_(1)
    factor = sums.momentum
    if factor is None:
        factor = 1.0 if sums.batches is None else 1.0 / float(sums.batches)
    shift = sums.total / sums.count
    variance = (sums.squares - sums.total * shift) / max(1, sums.count - 1)
    running_mean.add_((shift * factor).to(running_mean.dtype))
    if sums.running_var is not None:
        sums.running_var.mul_(1 - factor).add_((variance * factor).to(sums.running_var.dtype))
