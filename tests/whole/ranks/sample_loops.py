"""Steps over ranks of models and losses that go through their samples one by one, or take lists of samples."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

import fxpipe
from tests.capture.batch import test_sample_numbers_of_their_own as own_numbers
from tests.capture.batch.test_sample_lists import Boxes, images, of_boxes, targets_of
from tests.capture.batch.test_sample_loops import Model, each_alone, in_two


def as_the_model(group: Any, options: Mapping[str, Any], lists: bool) -> None:
    """The losses and gradients of steps, of batches of several sizes in turn, with calls between them. With `lists`,
    targets are lists of dicts."""
    model = Boxes().double() if lists else Model(in_two)
    loss_fn: Any = of_boxes if lists else each_alone
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, group=group, timeout=60, **options)
    of = dict(plain.named_parameters())
    for samples in (8, 10, 8):
        x = images(samples)
        counts = tuple(1 + at % 3 for at in range(samples))
        target = targets_of(counts, samples) if lists else torch.ones(samples, 3, 3, dtype=torch.float64)
        plain.zero_grad()
        pipe.zero_grad()
        expected = loss_fn(plain(x), target)
        expected.backward()
        found = pipe.step(x, target=target, loss_fn=loss_fn)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
        for path, parameter in pipe.named_parameters():
            zero = torch.zeros_like(of[path])
            ours, theirs = (zero if grad is None else grad for grad in (parameter.grad, of[path].grad))
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=path)
        with torch.no_grad():
            torch.testing.assert_close(pipe(x), plain(x), rtol=1e-9, atol=1e-9)
    pipe.close()


def with_numbers(group: Any, options: Mapping[str, Any]) -> None:
    """Each sample has numbers of its own: steps, and calls between them, of batches of several sizes."""
    model = own_numbers.Model(own_numbers.between)
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, group=group, timeout=60, **options)
    of = dict(plain.named_parameters())
    for samples in (8, 10, 8):
        given = own_numbers.batch(samples)
        plain.zero_grad()
        pipe.zero_grad()
        expected = plain(*given).square().mean()
        expected.backward()
        found = pipe.step(*given, loss_fn=mean_of_squares)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
        for path, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, of[path].grad, rtol=1e-9, atol=1e-9, msg=path)
        with torch.no_grad():
            torch.testing.assert_close(pipe(*given), plain(*given), rtol=1e-9, atol=1e-9)
    pipe.close()


def mean_of_squares(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()
