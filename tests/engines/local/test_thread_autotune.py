"""One thread or all workers: whichever is faster, and the same to the last bit."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.engines.local.thread_autotune import SMALL, TRIALS, ThreadAutotune

X, Y = torch.randn(6, 4), torch.randn(6, 4)


def take(pace: ThreadAutotune, seconds: dict[bool, float], steps: int) -> list[bool]:
    """How so many steps were run."""
    ways = []
    for _ in range(steps):
        ways.append(pace.choose())
        pace.note(ways[-1], seconds[ways[-1]])
    return ways


@pytest.mark.parametrize("faster", [False, True])
def test_both_are_tried_in_turn_and_the_faster_stays(faster: bool) -> None:
    ways = take(ThreadAutotune(10), {faster: SMALL, not faster: 2 * SMALL}, 50)
    assert ways[: 1 + 2 * TRIALS] == [False, *[False, True] * TRIALS]
    assert set(ways[1 + 2 * TRIALS :]) == {faster}


def test_large_steps_are_never_run_alone() -> None:
    assert not any(take(ThreadAutotune(10), {False: 11 * SMALL, True: 0.0}, 20))


def test_the_first_step_says_nothing() -> None:
    pace = ThreadAutotune(10)
    pace.note(False, 100.0)
    assert True in take(pace, {False: SMALL, True: SMALL}, 3)


class Threads(nn.Linear):
    """Notes where it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(seen_by(x), self.weight, self.bias)


@torch.compiler.allow_in_graph
def seen_by(x: torch.Tensor) -> torch.Tensor:
    names.add(threading.current_thread().name)
    return x.clone()


names: set[str] = set()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved"])
def test_the_same_to_the_last_bit(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Threads(4, 4), nn.Dropout(0.5)) for _ in range(4)))
    pipe = fxpipe.compile(model, ["cpu:0", "cpu:1"] if schedule == "interleaved" else 4, 3, schedule=schedule)
    found = []
    for alone in (False, True):
        monkeypatch.setattr(ThreadAutotune, "choose", lambda pace, alone=alone: alone)
        pipe.zero_grad()
        torch.manual_seed(1)
        pipe.step(X, target=Y, loss_fn=F.mse_loss)
        names.clear()
        pipe.zero_grad()
        torch.manual_seed(1)
        loss = pipe.step(X, target=Y, loss_fn=F.mse_loss)
        assert (len(names) == 1) == alone
        found.append([loss, *(parameter.grad for parameter in pipe.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
