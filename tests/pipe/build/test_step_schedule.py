"""Schedules that run forwards out of order where forward writes."""

from __future__ import annotations

import copy
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.ir.schedule.schedule import parse


class Counts(nn.Module):
    """Writes a buffer in forward; what it leaves there depends on the order of the micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


IN_DISORDER = """
    by hand: 2 stages, 2 micro-batches
    clock      0   1   2   3   4   5
    device 0  F1  F0          B0  B1
    device 1      F1  F0  B0  B1
"""


@pytest.mark.parametrize("split", ["norm", "last"])
def test_forwards_out_of_order_that_write_buffers(split: str) -> None:
    """The error names the buffer and the line; nothing is refused where order does not matter."""
    x = torch.randn(8, 4)
    schedule = parse(dedent(IN_DISORDER))
    options: dict[str, Any] = {"devices": 2, "chunks": 2, "cut": [split], "schedule": schedule}
    pipe = fxpipe.compile(Counts(), **options)
    message = r"forward writes norm\.running_mean here, .* runs F1 of stage . before F0"
    with pytest.raises(PlanError, match=message) as raised:
        pipe.step(x, target=x, loss_fn=F.mse_loss)
    assert "test_step_schedule.py" in str(raised.value)
    model = Counts()
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, deferred_batch_norm=True, **options)
    pipe.step(x, target=x, loss_fn=F.mse_loss)
    plain(x)
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
    fxpipe.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **options | {"cut": ["1"]}).step(
        x, target=x, loss_fn=F.mse_loss
    )
