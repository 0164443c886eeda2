"""Steps over ranks of models and losses that go through their samples one by one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

import fxpipe
from tests.capture.batch.test_sample_loops import Model, each_alone, in_two


def as_the_model(group: Any, options: Mapping[str, Any]) -> None:
    """The losses and gradients of steps, of batches of several sizes in turn, with calls between them."""
    model = Model(in_two)
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, group=group, timeout=60, **options)
    of = dict(plain.named_parameters())
    for samples in (8, 10, 8):
        x = torch.randn(samples, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(samples))
        target = torch.ones(samples, 3, 3, dtype=torch.float64)
        plain.zero_grad()
        pipe.zero_grad()
        expected = each_alone(plain(x), target)
        expected.backward()
        found = pipe.step(x, target=target, loss_fn=each_alone)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
        for path, parameter in pipe.named_parameters():
            zero = torch.zeros_like(of[path])
            ours, theirs = (zero if grad is None else grad for grad in (parameter.grad, of[path].grad))
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=path)
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), plain(x), rtol=1e-9, atol=1e-9)
    pipe.close()
