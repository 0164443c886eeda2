"""A step over ranks is the model's: loss, outputs, all gradients and buffers, for every model under every schedule.

By default a few models run, chosen for what crosses between their stages, in some schedules each; `slow` runs a
third of the schedules for each model, and the next third for the next, over 2 ranks for two models and over 4 for the
next two: each schedule in each mode of recomputation occurs over both.
"""

from __future__ import annotations

import pytest

from tests.helpers.marks import mostly_slow, slow_in_turn
from tests.helpers.models import MODELS
from tests.whole.ranks.cases import Config
from tests.whole.ranks.product import check
from tests.whole.test_steps import CHECKPOINTS, NAMES

# What crosses between ranks: skips, tied weights, random numbers, views, masks, constants, numbers; and buffers.
FEW = (
    "skip ladder", "tied transformer", "batch norm", "transformer with dropout", "masked", "counter", "frozen",
)  # fmt: skip


def configs(start: int, count: int) -> list[Config]:
    """So many of the schedules, from one on; the modes of recomputation go round."""
    return [(NAMES[k % len(NAMES)], CHECKPOINTS[k % len(CHECKPOINTS)]) for k in range(start, start + count)]


@pytest.mark.parametrize(("index", "name"), mostly_slow(enumerate(FEW), lambda one: one[1] == "skip ladder"), ids=FEW)
def test_some_schedules_are_the_model(index: int, name: str) -> None:
    """Three over 2 ranks and two over 4; each occurs over both."""
    assert check(name, {2: configs(3 * index, 3), 4: configs(2 * index, 2)}) == 5


@pytest.mark.parametrize(("index", "name"), slow_in_turn(enumerate(MODELS), 3), ids=MODELS)
def test_every_schedule_is_the_model(index: int, name: str) -> None:
    count = len(NAMES) // 3
    own = configs(index * count, count)
    assert check(name, {2: [], 4: own} if index // 2 % 2 else {2: own, 4: []}) == count
