"""Backward goes where the model's own backward would go, and nowhere else.

A value that the model only measures (detached, or read under `no_grad`) has no backward, and what is behind it may be
gone by then: overwritten, or freed by a backward before. Autograd looks at it even for a gradient that is not there.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.ir.plan.plan import Plan, StagePlan


class Measured(nn.Module):
    """`seen` needs `h` for its backward, which never comes; by then `h` holds something else."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 2
        seen = self.b(h)
        h.add_(1)
        return self.c(h) * seen.detach().tanh()


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_a_measured_value_crosses_a_cut(checkpoint: str) -> None:
    model, x = Measured(), torch.randn(6, 4)
    ops = ("linear", "h", "seen", "h_1", "linear_2", "detach", "tanh", "mul_1")
    stages = tuple(StagePlan(part, f"cpu:{j}", checkpoint) for j, part in enumerate((ops[:4], ops[4:])))
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, plan=Plan("Measured", stages, chunks=3))
    for net in (plain, pipe):
        net(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(pipe.get_parameter(name).grad, parameter.grad)
    pipe.close()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_input_whose_own_backward_is_over(checkpoint: str) -> None:
    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, target: Tensor, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh()) * target.detach()

    teacher, x = nn.Linear(4, 4), torch.randn(6, 4)
    target = teacher(x).tanh()
    target.sum().backward()  # frees what is behind the target
    pipe = fxpipe.compile(Student(), 2, 3, checkpoint=checkpoint)
    pipe(target, x).sum().backward()
    assert 'detached = ("target",)' in pipe.files["scheduler.py"]
    pipe.close()
