"""What ranks do in test_timelines.py."""

from __future__ import annotations

import re
from itertools import pairwise
from time import perf_counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fxpipe
from fxpipe.engines.common import step_timer as timed
from fxpipe.engines.ranks import clock_sync as clocks
from fxpipe.engines.ranks import rank_timer as timed_rank
from fxpipe.ir.schedule.schedule import Action
from fxpipe.ir.timeline import Timeline, check
from fxpipe.viz import chrome_trace as trace
from fxpipe.viz import text_timeline as text
from tests.whole.ranks.cases import chain


def spread(group: Any, schedule: str) -> None:
    """One timeline on all ranks, of a step with the gradients of any other."""
    pipe, model, (x, y) = chain(group, schedule, timeout=60)
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    wanted = gradients(model)
    with pytest.raises(fxpipe.FxpipeError, match="no step was timed yet"):
        _ = pipe.timeline
    model.zero_grad()
    pipe.step(x, target=y, loss_fn=F.mse_loss, timeline=pipe.leads)  # it is the leader's to say
    for key, grad in gradients(model).items():
        torch.testing.assert_close(grad, wanted[key], rtol=0, atol=0)
    found = pipe.timeline
    assert found is not None
    assert all(other == found for other in pipe.collect(found))
    is_of(pipe, found)
    assert str(pipe.compare()).splitlines()[-2].startswith("cpu:3 kept for backward")
    diagnosis = pipe.diagnose()
    split, planned = diagnosis.measured, diagnosis.replan()
    assert all(
        other == (planned.text, planned.seconds, planned.before)
        for other in pipe.collect((planned.text, planned.seconds, planned.before))
    )
    start, end = found.window
    assert start <= found.start <= found.end <= end == start + split.seconds
    assert tuple(split.parts) == found.devices
    for parts in split.parts.values():
        assert sum(parts.values()) == pytest.approx(split.seconds)
        assert parts["computing"] > 0
    for drawn in (text.bars(found), found._repr_svg_(), trace.trace(found)):
        assert "cpu:3" in drawn
    pipe.close()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def is_of(pipe: fxpipe.Pipe, found: Timeline) -> None:
    """All that the schedule has, in its order; nothing arrives before it was sent, nor is it used before."""
    check(found)
    assert (found.name, found.devices) == (pipe.schedule.name, pipe.programs.devices)
    for device, row in zip(found.devices, pipe.schedule.devices, strict=True):
        done = [Action(span.kind, span.stage, span.micro_batch) for span in found.on(device)]
        assert [action for action in done if action.kind != "R"] == list(row)
    assert all(peak > 0 for peak in found.high_water)
    moved = [span for span in found.spans if span.kind == "T"]
    assert len(moved) == sum(
        step.do == "send" and step.what.micro_batch is not None for row in pipe.programs.rows for step in row
    )
    runs = {(span.stage, span.micro_batch, span.kind): span for span in found.spans}
    for span in moved:
        kinds = "BI" if span.label.startswith("gradient") else "F"
        target, i = int(span.where.rpartition(":")[2]), span.micro_batch
        made, used = (next(runs[j, i, kind] for kind in kinds if (j, i, kind) in runs) for j in (span.stage, target))
        assert made.end <= span.start <= span.end <= used.start
    for link in found.links:
        assert all(one.end <= other.start for one, other in pairwise(found.on(link)))


def far_apart(group: Any) -> None:
    """The clock of each rank began at another time."""
    later = 1000.0 * dist.get_rank(group)
    pipe, _, (x, y) = chain(group, "gpipe", timeout=60)
    with (
        patch.object(clocks, "perf_counter", lambda: perf_counter() + later),
        patch.object(timed, "perf_counter", lambda: perf_counter() + later),
        patch.object(timed_rank, "perf_counter", lambda: perf_counter() + later),
    ):
        pipe.step(x, target=y, loss_fn=F.mse_loss, timeline=True)
    assert 0 <= pipe.timeline.start <= pipe.timeline.end < 500
    pipe.close()


def profiled(group: Any) -> None:
    """A profile of a rank has the actions of its own stage."""
    pipe, _, (x, y) = chain(group, "1f1b", timeout=60)
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        pipe.step(x, target=y, loss_fn=F.mse_loss)
    own = {f"{action.kind}{action.stage}.{action.micro_batch}" for action in pipe.build.schedule.devices[group.rank()]}
    assert {event.name for event in recorded.events() if re.fullmatch(r"[FB]\d+\.\d+", event.name)} == own
    pipe.close()
