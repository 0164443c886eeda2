"""Steps over ranks of models and losses that go through their samples one by one, or take lists of samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from tests.capture.batch import test_counted_rows as rows
from tests.capture.batch import test_sample_numbers_of_their_own as own
from tests.capture.batch.test_sample_lists import Boxes, images, of_boxes, targets_of
from tests.capture.batch.test_sample_loops import Model, each_alone, in_two
from tests.capture.opaque import test_methods_kept_whole as methods_kept_whole

Batch = tuple[tuple[Tensor, ...], Any]  # the arguments and the target of so many samples
Case = tuple[nn.Module, Callable[..., Tensor], Callable[[int], Batch]]


def loops() -> Case:
    return Model(in_two), each_alone, lambda samples: ((images(samples),), torch.ones(samples, 3, 3).double())


def lists() -> Case:
    """Targets are lists of dicts."""

    def batch(samples: int) -> Batch:
        return (images(samples),), targets_of(tuple(1 + at % 3 for at in range(samples)), samples)

    return Boxes().double(), of_boxes, batch


def numbers() -> Case:
    """Each sample has numbers of its own."""
    return own.Model(own.between), F.mse_loss, lambda samples: (own.batch(samples), torch.zeros(samples, 3).double())


def counted() -> Case:
    """Each sample has rows of its own, which another input counts."""

    def batch(samples: int) -> Batch:
        given = rows.batch(tuple((1 + at % 2, 1 + (at + samples) % 3) for at in range(samples)), samples)
        return given, given[0]

    return rows.Reader().double(), rows.token_loss, batch


def methods() -> Case:
    """Methods are kept whole, on one of the ranks."""
    return methods_kept_whole.Reader().double(), rows.token_loss, counted()[2]


MORE: dict[Callable[[], Case], dict[str, Any]] = {case: {"batch_dim": rows.ROWS} for case in (counted, methods)}


def as_the_model(group: Any, options: Mapping[str, Any], case: Callable[[], Case]) -> None:
    """The losses and gradients of steps, of batches of several sizes in turn, with calls between them."""
    model, loss_fn, batch = case()
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, group=group, timeout=60, **options, **MORE.get(case, {}))
    of = dict(plain.named_parameters())
    for samples in (8, 10, 8):
        given, target = batch(samples)
        plain.zero_grad()
        pipe.zero_grad()
        expected = loss_fn(plain(*given), target)
        expected.backward()
        found = pipe.step(*given, target=target, loss_fn=loss_fn)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
        for path, parameter in pipe.named_parameters():
            zero = torch.zeros_like(of[path])
            ours, theirs = (zero if grad is None else grad for grad in (parameter.grad, of[path].grad))
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=path)
        with torch.no_grad():
            torch.testing.assert_close(pipe(*given), plain(*given), rtol=1e-9, atol=1e-9)
    pipe.close()
