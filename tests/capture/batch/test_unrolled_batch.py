"""A batch that is taken apart into its samples and joined again is a batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import capture
from fxpipe.errors import CaptureError


class Rejoined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.fc(x)
        one, two, three = torch.cat(list(h), dim=0), torch.stack([*h]), torch.concatenate([*h])
        two += 1  # a copy: h stays what it is
        return one.tanh() + three, two * h


class Turned(Rejoined):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.fc(x)
        return torch.stack([h[1], h[0]]), h


class Columns(Rejoined):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.fc(x)
        return torch.cat(list(h), dim=1), h


def test_samples_that_are_joined_as_they_were() -> None:
    model, x = Rejoined().double(), torch.randn(8, 3, 4, dtype=torch.double)
    pipe = fxpipe.compile(model, devices=["cpu"] * 2, chunks=4)
    found = pipe(x)
    grads = torch.autograd.grad(sum(out.square().sum() for out in found), list(model.parameters()))
    wanted = [torch.cat(parts) for parts in zip(*(model(part) for part in x.chunk(4)), strict=True)]
    torch.testing.assert_close(list(found), wanted)
    torch.testing.assert_close(
        grads, torch.autograd.grad(sum(out.square().sum() for out in wanted), list(model.parameters()))
    )
    pipe.close()


@pytest.mark.parametrize("kind", [Turned, Columns])
def test_samples_that_are_joined_in_another_way(kind: type[Rejoined]) -> None:
    """What is made of them is not of the shape of a batch, or not in its order."""
    with pytest.raises(CaptureError):
        capture(kind(), (torch.randn(2, 3, 4),))
