"""Switches of cuDNN that forward sets are set in the stages, around the same ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe


class Switches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.backends.cudnn.flags(enabled=False, deterministic=True):
            x = torch.tanh(x)
            with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=True):
                y = x.exp()
        return self.second(x) + y


@pytest.mark.parametrize("options", [{}, {"schedule": "zb-h1", "backward": "code"}], ids=["autograd", "code"])
def test_steps_and_calls_are_the_models(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Switches().double(), torch.randn(8, 4, dtype=torch.float64)
    expected = model(x)
    expected.sum().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    pipe = fxpipe.compile(model, devices=2, chunks=2, **options)
    torch.testing.assert_close(pipe(x), expected)
    torch.testing.assert_close(pipe.graph_module(x), expected)
    pipe.step(x, loss_fn=lambda y: y.sum())
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], wanted)
    assert len(pipe.stages) == 2
    pipe.close()


def test_they_are_around_the_ops() -> None:
    pipe = fxpipe.compile(Switches(), devices=1, chunks=2, example_inputs=torch.randn(8, 4))
    outer = "with torch.backends.cudnn.flags(enabled=False, benchmark=False, deterministic=True, allow_tf32=True):"
    inner = "torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True)"
    [source] = [stage.source for stage in pipe.stages]
    assert outer in " ".join(source.split())
    assert inner in " ".join(source.split())
    pipe.close()


def test_they_are_what_they_were_after_a_capture_that_is_refused() -> None:
    class Refuses(Switches):
        def forward(self, x: Tensor) -> Tensor:
            with torch.backends.cudnn.flags(enabled=not torch.backends.cudnn.enabled):
                raise ValueError("no")

    before = torch.backends.cudnn.enabled
    with pytest.raises(ValueError, match="no"):
        fxpipe.compile(Refuses(), devices=2, chunks=2)(torch.randn(8, 4))
    assert torch.backends.cudnn.enabled == before
