"""Steps over ranks of models with functions that are kept whole by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import fxpipe
from tests.capture.opaque import test_functions_kept_whole as functions


def as_the_model(group: Any, name: str, options: Mapping[str, Any]) -> None:
    """The losses and gradients of steps, of one batch after the other."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(getattr(functions, name)().double())
    plain, model = models
    pipe = fxpipe.compile(model, group=group, timeout=60, **options)
    of = dict(plain.named_parameters())
    for samples in (4, 6):
        x, labels = functions.batch(samples)
        plain.zero_grad()
        pipe.zero_grad()
        expected = plain(x, labels)["loss"]
        expected.backward()
        torch.testing.assert_close(pipe.step(x, labels), expected.detach(), rtol=1e-9, atol=1e-9)
        for path, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, of[path].grad, rtol=1e-9, atol=1e-9, msg=path)
    pipe.close()
