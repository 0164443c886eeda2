"""The checker misses nothing of ours: without any one of the statements that order streams, something is found.

What is found is an access that nothing orders, or, of a statement that only serves a measurement, a time that is wrong
or cannot be had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from torch import Tensor

import fxpipe
from fxpipe.codegen.scheduler import forward_scheduler
from fxpipe.ir.timeline import Timeline
from fxpipe.pipe.build.local_cluster import _device_seconds
from fxpipe.profiling.measure import _timed
from tests.helpers.models import MODELS
from tests.helpers.transparency import build, inputs, on_cpu

from .child_process import on_device
from .pipelines import MIXED, THREE
from .removals import Statement, removed, statements
from .simulated_device import DisorderError, checked, durations
from .test_pipes import Wide

pytestmark = pytest.mark.accelerator

COMPUTE, COPY = 0.002, 0.006  # seconds that operations and copies take where times are looked at


def total(output: Tensor) -> Tensor:
    return output.sum()


@cache
def runs() -> Mapping[str, Callable[[], None]]:
    """What runs without the statement: calls with backward, steps, offload, timelines, measurements."""
    case = MODELS["long skip"]
    args, _ = inputs(case, 8)
    wide = torch.randn(512, 64, dtype=torch.float64)
    made: dict[str, Callable[[], None]] = {}
    for name, devices in {"three": THREE, "mixed": MIXED}.items():
        called, stepped = (fxpipe.compile(build(case), devices, 3, checkpoint="never") for _ in range(2))
        made[f"call {name}"] = lambda pipe=called: case.loss(on_cpu(pipe(*args))).backward()
        made[f"step {name}"] = lambda pipe=stepped: pipe.step(*args, loss_fn=total)
    # Where one value alone goes to the CPU, no other copy orders the streams by chance.
    chain = fxpipe.compile(Wide(), ["sim:0", "cpu:0"], 3, checkpoint="never")
    made["step chain"] = lambda: chain.step(torch.randn(6, 64), loss_fn=total)
    moved = fxpipe.compile(Wide().double(), THREE, 2, schedule="gpipe", checkpoint="never", offload=range(3))
    made["offload"] = lambda: moved.step(wide, loss_fn=total)
    timed = fxpipe.compile(Wide(), THREE, 3, schedule="1f1b")
    made["timeline"] = lambda: look(timed)
    made["profile"] = lambda: _timed(torch.device("sim:0"), lambda: torch.ones(4, device="sim:0"))
    made["links"] = lambda: _device_seconds("sim:0", lambda: torch.ones(4, device="sim:0"))
    for run in made.values():
        run()
    return made


def look(pipe: fxpipe.Pipe) -> None:
    """A step's timeline says how long copies take, and its devices have one clock, also if one was busy before."""
    with durations(COMPUTE, COPY):
        x, busy = torch.randn(6, 64), torch.ones(4, device="sim:0")
        for _ in range(60):
            busy = busy + 1
        pipe.step(x, loss_fn=total, timeline=True)
    timeline = pipe.timeline
    assert isinstance(timeline, Timeline)
    copies = [span for span in timeline.spans if span.kind == "T"]
    assert copies
    backward = {(span.stage, span.micro_batch): span.start for span in timeline.spans if span.kind == "B"}
    for span in copies:
        assert span.end - span.start < 2 * COPY, span
        if span.where == "sim:1 -> sim:0":
            assert span.end <= backward[0, span.micro_batch] + COMPUTE, span


def found(run: Callable[[], None]) -> str | None:
    """What goes wrong; None if nothing does."""
    try:
        with checked():
            run()
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@on_device
def test_nothing_is_found_as_it_is() -> None:
    for name, run in runs().items():
        assert found(run) is None, f"{name}: {found(run)}"


@pytest.mark.parametrize("statement", statements(), ids=str)
@on_device
def test_without_a_statement_something_is_found(statement: Statement) -> None:
    runs()
    with removed(statement):
        assert any(found(run) for run in runs().values()), f"nobody misses {statement}"
    torch.accelerator.synchronize("sim:0")


@on_device
def test_without_the_wait_in_generated_code_something_is_found() -> None:
    case, own = MODELS["long skip"], forward_scheduler._sends
    forward_scheduler._sends = lambda stage, places: ()
    try:
        pipe = fxpipe.compile(build(case), THREE, 3, checkpoint="never")
        with pytest.raises(DisorderError, match=r"a copy from sim:0 to sim:1, .*device_copy.py"), checked():
            pipe(*inputs(case, 8)[0])
    finally:
        forward_scheduler._sends = own
    pipe.close()


def test_the_list_is_whole() -> None:
    modules = {statement.module.rpartition(".")[2] for statement in statements()}
    assert modules >= {"streams", "device_copy", "transfer", "offload", "step_timer", "measure", "local_cluster"}
