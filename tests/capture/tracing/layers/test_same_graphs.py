"""By layers or whole, the graph is the same: for the models of the table, and for random stacks of layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from types import MethodType
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.capture import CallCapture
from tests.helpers.marks import mostly_slow, slow_in_turn
from tests.helpers.models import MODELS
from tests.helpers.transparency import build, inputs

from .test_layers import Counted, Counting, Layer, Net, Numbered, X, doubled, said

QUICK = ("tied transformer", "batch norm", "counter")
SLOW = ("transformer with dropout", "unet")
IN_TURN = [name for name in MODELS if name not in QUICK + SLOW]


@pytest.mark.parametrize("name", [*mostly_slow(QUICK + SLOW, QUICK.__contains__), *slow_in_turn(IN_TURN, 3)])
def test_models_of_the_table(name: str) -> None:
    case, found = MODELS[name], []
    for by_layers in (True, False):
        capture = CallCapture(build(case), reduce=case.reduce)
        if not by_layers:
            capture.layers.give_up()
        args, kwargs = inputs(case, 7)
        found.append(said(capture.capture(args, kwargs)))
    assert found[0] == found[1]


def narrower(layer: Layer, _: Layer) -> None:
    layer.up, layer.down = nn.Linear(8, 6).double(), nn.Linear(6, 8).double()


def tied(layer: Layer, before: Layer) -> None:
    layer.up = before.up


# What one layer of a stack may have that the others do not.
CHANGES: dict[str, Callable[[Layer, Layer], Any]] = {
    "a float": lambda layer, _: setattr(layer, "scale", 0.75),
    "dropout": lambda layer, _: setattr(layer, "rate", 0.5),
    "a function": lambda layer, _: setattr(layer, "act", F.relu),
    "another attribute": lambda layer, _: setattr(layer, "more", [1, 2]),
    "sizes": narrower,
    "evaluation": lambda layer, _: layer.eval(),
    "a part in evaluation": lambda layer, _: layer.norm.eval(),
    "frozen": lambda layer, _: layer.requires_grad_(False),
    "a hook": lambda layer, _: layer.register_forward_hook(lambda module, given, made: made * 2),
    "a hook before": lambda layer, _: layer.register_forward_pre_hook(lambda module, given: (given[0] + 1,)),
    "a hook inside": lambda layer, _: layer.norm.register_forward_hook(lambda module, given, made: made * 3),
    "a tie": tied,
    "a class": lambda layer, _: setattr(layer, "__class__", Numbered),
    "a side effect": lambda layer, _: setattr(layer, "__class__", Counting),
    "a forward": lambda layer, _: setattr(layer, "forward", MethodType(doubled, layer)),
    "a part without": lambda layer, _: setattr(layer, "norm", nn.Identity()),
}


class Stack(Net):
    """Calls its layers in this order."""

    def __init__(self, order: list[int], layers: int) -> None:
        super().__init__(Layer, layers)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for at in self.order:
            x = self.h[at](x)
        return self.last(x)


def stack(seed: int) -> tuple[nn.Module, list[str]]:
    rng = Random(seed)
    count = rng.randint(3, 7)
    order = list(range(count))
    if rng.random() < 0.4:
        order.insert(rng.randint(0, count), rng.randrange(count))  # one runs twice
    model, changed = Stack(order, count), []
    for at in rng.sample(range(count), rng.randint(0, 3)):
        changed.append(f"{at}: {(what := rng.choice(list(CHANGES)))}")
        CHANGES[what](model.h[at], model.h[at - 1])
    return model, changed


@pytest.mark.parametrize("seed", [*mostly_slow(range(8), (1, 2, 3).__contains__), *slow_in_turn(range(8, 90), 4)])
def test_random_stacks(seed: int) -> None:
    model, changed = stack(seed)
    counted, other = Counted(copy.deepcopy(model)), CallCapture(copy.deepcopy(model))
    other.layers.give_up()
    assert said(counted.graph()) == said(other.capture((X,), {})), changed
    if not any("side effect" in line for line in changed):  # the plain copy counts too
        counted.check()
