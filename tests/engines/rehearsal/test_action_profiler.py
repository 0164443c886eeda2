"""Rehearsals: actions are timed one by one, and the model does not notice."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.engines.rehearsal.action_profiler import rehearse, stand_ins, wake
from fxpipe.errors import FxpipeError
from fxpipe.ir.schedule.action_times import Times
from fxpipe.ir.schedule.schedule import Action
from tests.helpers.marks import mostly_slow
from tests.helpers.slow_module import Slow


class Net(nn.Module):
    """Buffers that forward writes, random numbers, and a weight in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        return self.last(self.drop(self.middle(h)) + h)


X, Y = torch.linspace(-1, 1, 48).view(8, 6), torch.linspace(1, 2, 48).view(8, 6)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")


@pytest.fixture
def pipes() -> Iterator[list[fxpipe.Pipe]]:
    made: list[fxpipe.Pipe] = []
    yield made
    for pipe in made:
        pipe.close()


def compiled(pipes: list[fxpipe.Pipe], model: nn.Module, **options: Any) -> fxpipe.Pipe:
    pipes.append(fxpipe.compile(model, 2, 4, **options))
    return pipes[-1]


CASES = [  # each pair of settings occurs
    (name, mode, (i + j) % 2 == 1) for i, name in enumerate(SCHEDULES) for j, mode in enumerate(("never", "always"))
]


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "deferred"),
    mostly_slow(CASES, CASES[::3].__contains__),
)
def test_the_model_does_not_notice(pipes: list[fxpipe.Pipe], schedule: str, checkpoint: str, deferred: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    made = [
        compiled(pipes, net, schedule=schedule, checkpoint=checkpoint, deferred_batch_norm=deferred)
        for net in (model, twin)
    ]
    rehearsed, other = made
    for pipe in made:
        torch.manual_seed(1)
        pipe.step(X, target=Y, loss_fn=F.mse_loss)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    rehearsed.rehearse(X, target=Y, loss_fn=F.mse_loss, rounds=2)
    assert torch.equal(torch.get_rng_state(), state)
    for pipe in made:
        torch.manual_seed(3)
        pipe.step(X, target=Y, loss_fn=F.mse_loss)
    for name, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    for name, parameter in twin.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name  # type: ignore[arg-type]
    for one in (rehearsed, other):
        with pytest.raises(FxpipeError, match="no step was timed"):
            one.timeline  # noqa: B018


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_kind_of_action_is_timed(pipes: list[fxpipe.Pipe], schedule: str) -> None:
    pipe = compiled(pipes, Net(), schedule=schedule, checkpoint="always")
    loss = pipe.step(X, target=Y, loss_fn=F.mse_loss)
    times, outputs, _ = rehearse(pipe.scheduler, (X, Y), 4, rounds=2)  # type: ignore[arg-type]
    stages = len(pipe.stages)
    expected = set(pipe.schedule.place)
    assert len(times) == 2
    for one in times:
        # Where backward follows forward at once, as in a last stage, nothing is recomputed.
        again = {Action("R", stage, i) for stage in range(stages) for i in range(4)}
        assert expected <= set(one.actions) <= expected | again
        assert Action("R", 0, 0) in one.actions
        assert min(one.actions.values()) > 0
        assert min(one.before, one.after) > 0
        assert [link.ends for link in one.links] == [("cpu:0", "cpu:1")]
        assert 0 < one.links[0].latency < float("inf") == one.links[0].bandwidth
    assert any(torch.is_tensor(found) and found.shape == loss.shape for found in outputs)


def test_times_are_without_waiting_and_the_step_is_with(pipes: list[fxpipe.Pipe]) -> None:
    """The second stage waits for the first most of the time: that is in the timeline, and not in the times."""
    model = nn.Sequential(Slow(0.06, 0.12), Slow(0.006, 0.012))
    pipe = compiled(pipes, model, schedule="1f1b", checkpoint="never", cut=["1"], backward="autograd")
    pipe.step(X, target=Y, loss_fn=F.mse_loss)
    times, _, _ = rehearse(pipe.scheduler, (X, Y), 4, rounds=1)  # type: ignore[arg-type]
    took = times[0].actions
    assert min(took[Action("F", 0, i)] for i in range(4)) > 0.06
    assert min(took[Action("B", 0, i)] for i in range(4)) > 0.12
    last = min(took[Action("F", 1, i)] + took[Action("B", 1, i)] for i in range(4))
    assert last < 0.18, "what waiting for the first stage would take"
    timeline = pipe.rehearse(X, target=Y, loss_fn=F.mse_loss, rounds=1)
    assert timeline.makespan > 4 * 0.18
    assert timeline.idle[1] > timeline.makespan / 4


def test_stand_ins_take_what_the_model_would_have() -> None:
    shared, free = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    shared.grad = torch.full((2,), 3.0)
    made = torch.ones(2, requires_grad=True) * 2  # not a leaf
    pairs = [(tensor, tensor.detach()) for tensor in (shared, shared, free, made)]
    (first, _), (second, _), (third, _), (fourth, _) = stand_ins(pairs)
    assert first is second is not shared
    assert torch.equal(first.grad, shared.grad)  # type: ignore[arg-type]
    assert first.grad is not shared.grad
    assert third.grad is fourth.grad is None


def test_waking_takes_a_moment() -> None:
    assert 0 < wake(rounds=5) < 0.5


def test_an_error_reaches_the_caller(pipes: list[fxpipe.Pipe]) -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 1))
    pipe = compiled(pipes, model)
    ids = torch.arange(8) % 4
    target = torch.zeros(8, 1)
    pipe.step(ids, target=target, loss_fn=F.mse_loss)
    with pytest.raises(IndexError):
        rehearse(pipe.scheduler, (ids + 2, target), 4, rounds=1)  # type: ignore[arg-type]
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert isinstance(rehearse(pipe.scheduler, (ids, target), 4, rounds=1)[0][0], Times)  # type: ignore[arg-type]
