"""Steps over ranks of models in which data decides how many rows there are."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

import fxpipe
from tests.capture.batch.test_selected_rows import STEPS, Selecting, WithLoss, batch, returned


def as_the_model(group: Any, name: str, options: Mapping[str, Any]) -> None:
    """The losses and gradients of steps, of one batch after the other."""
    model = WithLoss(next(body for body in STEPS if body.__name__ == name))
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, group=group, timeout=60, **options)
    of = dict(plain.named_parameters())
    for samples in (8, 10):
        x, y = batch(samples)
        plain.zero_grad()
        pipe.zero_grad()
        expected = plain(x, y)
        expected.backward()
        torch.testing.assert_close(pipe.step(x, y), expected.detach(), rtol=1e-9, atol=1e-9)
        for path, parameter in pipe.named_parameters():
            zero = torch.zeros_like(of[path])
            ours, theirs = (zero if grad is None else grad for grad in (parameter.grad, of[path].grad))
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=path)
    pipe.close()


class Early(torch.nn.Module):
    """Returns rows that its first layer selects, and goes on with all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8).double() for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.layers[0](x)
        last = first
        for layer in self.layers[1:]:
            last = layer(last)
        return first[x > 0], last


def what_is_returned(group: Any) -> None:
    """Rows are returned, whichever stage has them."""
    x, y = batch(8)
    for model, args in ((Selecting(returned), (x, y)), (Early(), (x,))):
        plain = copy.deepcopy(model)
        pipe = fxpipe.compile(model, 2, 4, group=group, timeout=60)
        with torch.no_grad():
            torch.testing.assert_close(pipe(*args), plain(*args))
        pipe.close()
