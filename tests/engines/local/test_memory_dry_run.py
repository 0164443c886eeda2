"""The memory that a step on CPU workers takes, predicted without computing anything, beside what is measured."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.pipe.results.compare_timelines import with_memory
from tests.helpers.marks import mostly_slow

Made = tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout()
        self.fc = nn.Linear(8 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        y: Tensor = self.fc(self.drop(x).flatten(1))
        return y


class Skips(nn.Module):
    """Values that two stages keep, weights that two stages use, and a mask that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        mask = torch.ones(12, dtype=x.dtype).cumsum(0) > 3
        y: Tensor = self.c(torch.where(mask, self.b(h), h)) + h * x
        return y


def chain() -> Made:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    return model, torch.randn(19, 32), torch.randn(19, 8), F.mse_loss


def images() -> Made:
    return Images(), torch.randn(16, 3, 8, 8), torch.randint(10, (16,)), F.cross_entropy


def attention() -> Made:
    layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)]
    return nn.Sequential(*layers), torch.randn(10, 5, 16), torch.randn(10, 5, 16), F.mse_loss


def skips() -> Made:
    return Skips(), torch.randn(11, 12, requires_grad=True), torch.randn(11, 12), F.mse_loss


def step(made: Made, schedule: str, checkpoint: str) -> Any:
    model, x, y, loss_fn = made
    pipe = fxpipe.compile(model, ["cpu", "cpu"], 4, schedule=schedule, checkpoint=checkpoint)
    pipe.step(x, target=y, loss_fn=loss_fn, timeline=True)
    return pipe


def predicted(text: str) -> list[tuple[str, str]]:
    """What the table says of memory."""
    return re.findall(r"kept for backward +([\d.]+ \w+) +([\d.]+ \w+)", text)


CHECKPOINTS, SCHEDULES = ("never", "except_last", "always"), ("gpipe", "1f1b", "zb-h1")
# Each model under each schedule and in each mode; all models together have each schedule in each mode.
CASES = [
    (make, schedule, CHECKPOINTS[(i + j) % len(CHECKPOINTS)])
    for i, make in enumerate((chain, images, attention, skips))
    for j, schedule in enumerate(SCHEDULES)
]
CASES += [(chain, "interleaved", checkpoint) for checkpoint in CHECKPOINTS]  # four stages
QUICK = [
    (images, "1f1b", "always"), (images, "zb-h1", "never"), (skips, "gpipe", "never"), (skips, "1f1b", "except_last"),
    (chain, "zb-h1", "always"), (chain, "interleaved", "except_last"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "schedule", "checkpoint"), mostly_slow(CASES, QUICK.__contains__))
def test_the_memory_is_that_of_the_step_to_the_byte(make: Callable[[], Made], schedule: str, checkpoint: str) -> None:
    made = make()
    pipe = step(made, schedule, checkpoint)
    before = {name: value.clone() for name, value in pipe.model.state_dict().items()}
    numbers = torch.get_rng_state()
    found, note = with_memory(pipe.build.timeline, pipe._state.cache, pipe._state.timed)
    assert "run of this step on meta tensors" in note
    assert found.high_water == pipe.timeline.high_water
    assert min(found.high_water) > 0
    for device, *both in zip(found.devices, found.memory, pipe.timeline.memory, strict=True):
        ours, measured = ([held for _, held in steps] for steps in both)
        assert ours == measured  # as each action begins and ends
        assert [at for at, _ in both[0]] == [at for span in found.on(device) for at in (span.start, span.end)]
        assert ours[-1] == 0
    assert all(one == other for one, other in predicted(str(pipe.compare())))
    assert torch.equal(numbers, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in pipe.model.state_dict().items())
    pipe.step(made[1], target=made[2], loss_fn=made[3])  # all is as it was
    pipe.close()


@pytest.mark.parametrize("make", [chain, images])
def test_so_is_that_of_a_rehearsal(make: Callable[[], Made]) -> None:
    made = make()
    pipe = step(made, "1f1b", "except_last")
    assert pipe.rehearse(made[1], target=made[2], loss_fn=made[3], rounds=1).high_water == pipe.timeline.high_water
    assert str(pipe.compare()).endswith("\nmemory is predicted by the step that rehearse ran")
    pipe.close()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.lstm(x)[0])
        return y


def test_where_it_is_estimated_a_line_says_why() -> None:
    x = torch.randn(8, 5, 8)
    pipe = step((Recurrent(), x, x, F.mse_loss), "1f1b", "never")
    assert re.search(r"\nmemory is estimated: what .*, keeps is known once it runs$", str(pipe.compare()))
    assert pipe.rehearse(x, target=x, loss_fn=F.mse_loss, rounds=1).high_water == pipe.timeline.high_water
    pipe.close()
