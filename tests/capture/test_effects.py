"""What the second, symbolic run over a traced graph leaves out and sees."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxpipe.capture.front import capture
from fxpipe.ir.graph import target_name


class Counts(nn.Module):
    """Long arithmetic on the batch size that nothing needs, longer than Python's stack is deep."""

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        for _ in range(1200):
            count = count + 1
        return x.sin()


class Steps(nn.Module):
    """One tensor written again and again, a view of it from before the writes."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        view = y[:, :1]
        for _ in range(3):
            y += 1
        return y * view


def test_long_arithmetic_that_nothing_needs_is_left_out() -> None:
    graph = capture(Counts(), (torch.ones(4, 2),))
    assert [target_name(op.target) for op in graph.ops] == [".sin"]


def test_writes_are_to_what_is_still_read() -> None:
    graph = capture(Steps(), (torch.ones(4, 2),))
    writes = [op.writes for op in graph.ops if op.writes]
    assert writes == [("y", "view"), ("y_1", "view"), ("y_2", "view")]
