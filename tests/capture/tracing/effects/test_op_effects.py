"""What the second, symbolic run over a traced graph leaves out and sees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxpipe.capture import capture
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.graph import target_name


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


class Cast(nn.Module):
    """Sees to it in forward that its layer is of this type."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.fc = self.fc.to(torch.float32)
        y: Tensor = self.fc(x)
        return y


def test_a_layer_may_be_cast_to_the_type_that_it_has() -> None:
    graph = capture(Cast(), (torch.ones(4, 2),))
    assert [target_name(op.target) for op in graph.ops] == ["linear"]


class Doubles(Cast):
    def forward(self, x: Tensor) -> Tensor:
        self.fc.weight.data = self.fc.weight.data * 2
        return super().forward(x)


def test_a_parameter_may_not_get_other_data() -> None:
    with pytest.raises(CaptureError, match=r"writes into fc.weight, a parameter"):
        capture(Doubles(), (torch.ones(4, 2),))


def test_long_arithmetic_that_nothing_needs_is_left_out() -> None:
    graph = capture(Counts(), (torch.ones(4, 2),))
    assert [target_name(op.target) for op in graph.ops] == [".sin"]


def test_writes_are_to_what_is_still_read() -> None:
    graph = capture(Steps(), (torch.ones(4, 2),))
    writes = [op.writes for op in graph.ops if op.writes]
    assert writes == [("y", "view"), ("y_1", "view"), ("y_2", "view")]
