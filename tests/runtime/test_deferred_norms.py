"""Deferred batch norm against torch's on the whole mini-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.runtime import Stage, checkpoint, deferred_batch_norm
from fxpipe.runtime.caller_context import current_context
from fxpipe.runtime.deferred_norms import commit, discard


class Norm(Stage):
    states = ("running_mean", "running_var", "num_batches_tracked", "weight", "bias")
    mutates = ("running_mean", "running_var", "num_batches_tracked")
    momentum: float | None = 0.1

    def forward(self, x: Tensor) -> Tensor:
        mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
        return deferred_batch_norm(x, mean, var, count, self.weight, self.bias, self.momentum, 1e-5)


def stage_for(norm: nn.Module) -> Norm:
    return Norm(dict(norm.named_parameters()) | dict(norm.named_buffers()), {}, torch.device("cpu"))


def twins(momentum: float | None, dims: int) -> tuple[Any, Any]:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[dims]
    return kind(3, momentum=momentum).double(), kind(3, momentum=momentum).double()


@pytest.mark.parametrize("dims", [2, 3, 4])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_of_the_mini_batch(momentum: float | None, dims: int) -> None:
    ours, theirs = twins(momentum, dims)
    stage = stage_for(ours)
    stage.momentum = momentum
    for _ in range(3):
        x = torch.randn(7, 3, *(2,) * (dims - 2), dtype=torch.float64) * 3 + 5
        for piece in x.split([3, 2, 2]):
            assert torch.allclose(stage.forward(piece), F.batch_norm(piece, None, None, ours.weight, ours.bias, True))
        commit([stage])
        theirs(x)
        for name, buffer in theirs.named_buffers():
            torch.testing.assert_close(ours.get_buffer(name), buffer, rtol=1e-10, atol=1e-12)


def test_recomputation_does_not_count() -> None:
    ours, theirs = twins(0.1, 2)
    stage = stage_for(ours)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    outputs = [checkpoint(stage, (0, i), current_context(), None, piece)[0] for i, piece in enumerate(x.split(2))]
    commit([stage])
    torch.cat(outputs).square().sum().backward()
    commit([stage])
    theirs(x)
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(ours.get_buffer(name), buffer, rtol=1e-10, atol=1e-12)


def test_a_failed_mini_batch_is_forgotten() -> None:
    ours, _ = twins(0.1, 2)
    stage = stage_for(ours)
    stage.forward(torch.randn(4, 3, dtype=torch.float64))
    discard([stage])
    commit([stage])
    assert ours.num_batches_tracked == 0
    assert torch.equal(ours.running_mean, torch.zeros(3, dtype=torch.float64))
