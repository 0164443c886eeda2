"""Steps over ranks of models that look at the values of their inputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import fxpipe
from fxpipe.errors import RankError
from tests.capture.tracing.test_input_values import HOLES, IDS, LOOKS, ONES, Tokens, checked


def as_the_model(group: Any, name: str, options: Mapping[str, Any]) -> None:
    """Whichever micro-batch has the values that decide."""
    look = next(look for look in LOOKS if look.__name__ == name)
    model = Tokens(look)
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, group=group, timeout=60, **options)
    of = dict(plain.named_parameters())
    for mask in (ONES, HOLES, ONES):
        plain.zero_grad()
        pipe.zero_grad()
        expected = plain(IDS, IDS, mask)
        expected.backward()
        torch.testing.assert_close(pipe.step(IDS, IDS, mask), expected.detach())
        for path, parameter in pipe.named_parameters():
            grad = of[path].grad
            zero = torch.zeros_like(of[path])
            torch.testing.assert_close(
                zero if parameter.grad is None else parameter.grad, zero if grad is None else grad, msg=path
            )
    pipe.close()


def models_exception(group: Any) -> None:
    """The leader raises what the model raises, the others name it, and all can go on."""
    model, wrong = Tokens(checked), IDS.clone()
    wrong[7, 2] = 25
    pipe = fxpipe.compile(model, 2, 4, group=group, timeout=60)
    for _ in range(2):
        with pytest.raises((ValueError, RankError), match="labels are from 0 to 19, not 25"):
            pipe.step(IDS, wrong, ONES)
        pipe.step(IDS, IDS, ONES)
    pipe.close()
