"""What ranks do in test_rehearsals.py."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe import FxpipeError, RankError
from fxpipe.engines.rehearsal import rank_profiler
from fxpipe.ir.schedule.action_times import Times
from fxpipe.ir.schedule.schedule import Action
from fxpipe.pipe import pipe as pipes
from fxpipe.pipe.build.build import Build, rehearsed
from tests.engines.rehearsal.test_action_profiler import Net, X, Y
from tests.whole.ranks.cases import Boom, apart, at, throw
from tests.whole.ranks.tensor_parallel import FAR, over
from tests.whole.test_tensor_parallel import loss, planned

TIMEOUTS = {"": 60, FAR: 63}  # worlds are kept by their timeout


def compiled(group: Any, model: nn.Module, mode: str, **options: Any) -> fxpipe.Pipe:
    with apart(mode == FAR):
        return fxpipe.compile(model, 2, 4, group=group, timeout=TIMEOUTS[mode], **options)


def the_model_does_not_notice(group: Any, mode: str, **options: Any) -> None:
    """Two pipes of equal models take the same steps, and one is rehearsed between them: bit for bit the same."""
    torch.manual_seed(0)
    model = Net()
    models = model, copy.deepcopy(model)
    rehearsed, other = (compiled(group, net, mode, **options) for net in models)
    for pipe in (rehearsed, other):
        torch.manual_seed(1)
        pipe.step(X, target=Y, loss_fn=F.mse_loss)
    before = {key: value.clone() for key, value in rehearsed.state_dict().items()}
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    torch.manual_seed(2)
    state = torch.get_rng_state()
    rehearsed.rehearse(X, target=Y, loss_fn=F.mse_loss, rounds=2)
    assert torch.equal(torch.get_rng_state(), state)
    same(rehearsed.state_dict(), before)
    same({key: p.grad for key, p in model.named_parameters() if p.grad is not None}, grads)
    for pipe in (rehearsed, other):
        torch.manual_seed(3)
        pipe.step(X, target=Y, loss_fn=F.mse_loss)
    same(rehearsed.state_dict(), other.state_dict())
    same(*({key: p.grad for key, p in net.named_parameters() if p.grad is not None} for net in models))
    with pytest.raises(fxpipe.FxpipeError, match="no step was timed yet"):
        _ = rehearsed.timeline
    for pipe in (rehearsed, other):
        pipe.close()


def same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


def all_is_timed(group: Any, mode: str, schedule: str) -> None:
    """Each action of each rank has a time, and the prediction is the simulation with these, the same on all ranks."""
    pipe = compiled(group, Net(), mode, schedule=schedule, checkpoint="always")
    pipe.step(X, target=Y, loss_fn=F.mse_loss, timeline=True)
    seen: list[Times] = []

    def slower(made: Build, chunks: int, times: list[Times]) -> Any:
        seen.extend(times)
        slow = [replace(one, actions=dict.fromkeys(one.actions, 1.0), messages={}) for one in times]
        return rehearsed(made, chunks, slow)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipes, "rehearsed", slower)
        found = pipe.rehearse(X, target=Y, loss_fn=F.mse_loss, rounds=2)
    assert len(seen) == 2
    again = {Action("R", stage, i) for stage in range(len(pipe.plan.stages)) for i in range(4)}
    for one in seen:
        assert set(pipe.schedule.place) <= set(one.actions) <= set(pipe.schedule.place) | again
        assert Action("R", 0, 0) in one.actions
        assert min(one.actions.values()) > 0
        assert min(min(both) for both in one.messages.values()) >= 0
        assert min(one.before, one.after) > 0
        (link,) = one.links
        assert (link.ends, link.bandwidth < float("inf")) == (("cpu:0", "cpu:1"), mode == FAR)
    assert sum(found.busy) == pytest.approx(len(seen[0].actions)), "each action takes a second"
    assert found.call is not None
    assert found.call[0] < 0 < found.makespan < found.call[1]
    assert all(other == found for other in pipe.collect(found))
    assert found.high_water == pipe.timeline.high_water
    line = str(pipe.compare()).splitlines()[1]
    assert f"{found.makespan:.3g} s" in line, line
    pipe.close()


def sums_are_timed(group: Any, mode: str) -> None:
    """A plan that cuts ops over ranks, which add up parts."""
    model, x, plan = planned("mlp", "a stage of two", 2)
    pipe = over(group, model, plan, mode)
    pipe.step(x, loss_fn=loss)
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    found = pipe.rehearse(x, loss_fn=loss, rounds=1)
    assert {Action(s.kind, s.stage, s.micro_batch) for d in found.devices for s in found.on(d)} == set(
        pipe.schedule.place
    )
    same({key: p.grad for key, p in model.named_parameters() if p.grad is not None}, grads)
    pipe.zero_grad()
    pipe.step(x, loss_fn=loss)
    same({key: p.grad for key, p in model.named_parameters() if p.grad is not None}, grads)
    pipe.close()


def fails(group: Any, mode: str) -> None:
    """An error in a rehearsal is raised on all ranks, and so is a call of one rank alone; then all goes on."""
    rank = dist.get_rank(group)
    pipe = compiled(group, Net(), mode)
    pipe.step(X, target=Y, loss_fn=F.mse_loss)
    replay = rank_profiler.once

    def thrown(*args: Any) -> Times:
        at(pipe, "1F2", throw)  # type: ignore[arg-type]
        return replay(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_profiler, "once", thrown)
        with pytest.raises(Boom if rank == 1 else RankError):
            pipe.rehearse(X, target=Y, loss_fn=F.mse_loss)
    with pytest.raises(RankError, match="rank 0 is in rehearse, rank 1 is in step"):
        (pipe.step if rank else pipe.rehearse)(X, target=Y, loss_fn=F.mse_loss)
    with pytest.raises(FxpipeError, match="rounds"):
        pipe.rehearse(X, target=Y, loss_fn=F.mse_loss, rounds=0)
    assert pipe.rehearse(X, target=Y, loss_fn=F.mse_loss, rounds=1).makespan > 0
    pipe.close()
