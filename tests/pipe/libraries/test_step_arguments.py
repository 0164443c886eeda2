"""A step of a model of transformers that returns no outputs passes use_cache=False, unless the user passes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe


class PreTrainedModel(nn.Module):
    """Stands for that of transformers."""


PreTrainedModel.__module__ = "transformers.modeling_utils"


class Cached(PreTrainedModel):
    """Without a word, its forward has a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor, use_cache: bool = True) -> dict[str, Tensor]:
        if use_cache:
            raise ValueError("it has a cache")
        return {"loss": (self.fc(x) - labels).square().mean()}


class Other(nn.Module):
    """A model that has an argument of this name, and is of no library."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, use_cache: bool = True) -> Tensor:
        y: Tensor = self.fc(x)
        return y.square() if use_cache else y


X, Y = torch.ones(4, 4), torch.zeros(4, 4)


def test_a_step_asks_for_no_cache() -> None:
    pipe = fxpipe.compile(Cached(), 1, 2)
    loss = pipe.step(X, labels=Y)
    torch.testing.assert_close(loss, pipe.model(X, Y, False)["loss"].detach())
    pipe.close()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((X, Y, True), {}), ((X,), {"labels": Y, "use_cache": True}), ((X, Y), {"outputs": True})],
    ids=["by position", "by name", "with outputs"],
)
def test_what_the_user_asks_for_is_passed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    pipe = fxpipe.compile(Cached(), 1, 2)
    with pytest.raises(ValueError, match="it has a cache"):
        pipe.step(*args, **kwargs)
    pipe.close()


def test_models_of_no_library_are_left_alone() -> None:
    pipe = fxpipe.compile(Other(), 1, 2)
    loss = pipe.step(X, loss_fn=lambda y: y.sum())
    torch.testing.assert_close(loss, pipe.model(X).sum().detach())
    pipe.close()
