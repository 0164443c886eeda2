"""The benchmark of the interpreter lock: its rows are there, and its pipes take real steps."""

from __future__ import annotations

import pytest
import torch

from benchmarks import interpreter_lock
from fxpipe.engines.common.step_engine import StepScheduler
from tests.accelerator.child_process import on_device
from tests.accelerator.simulated_device import missing

without_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.slow
def test_each_way_has_a_rate_for_each_number_of_devices() -> None:
    rows = list(interpreter_lock.rates("cpu", (1, 2), chunks=2, rounds=1, steps=1))
    assert [row[0] for row in rows] == [1, 2]
    assert all(len(row) == 4 and min(row) > 0 for row in rows)  # type: ignore[type-var]


def test_a_pipe_has_a_stage_and_a_thread_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step goes over the threads: no trial of one thread alone."""
    ran: list[object] = []
    monkeypatch.setattr(StepScheduler, "_work", spied(ran))
    with interpreter_lock.pipe_step("cpu", range(3), chunks=2) as step:
        for _ in range(12):
            ran.clear()
            step()
            assert sorted(ran) == [0, 1]  # type: ignore[type-var]


def spied(ran: list[object]):  # type: ignore[no-untyped-def]
    work = StepScheduler._work

    def run(self: StepScheduler, m: object, j: int) -> None:
        ran.append(j)
        work(self, m, j)  # type: ignore[arg-type]

    return run


@without_compiler
@pytest.mark.accelerator
@pytest.mark.slow
@on_device
def test_devices_that_are_busy_take_their_time() -> None:
    """What the pipe reaches is at most what its devices alone would reach."""
    torch.set_num_threads(1)
    (row,) = interpreter_lock.busy_rates((2,), (5e-3,), chunks=4, rounds=1, steps=1)
    count, pipe, device = row
    assert count == 2
    assert 0 < pipe <= device * 1.05  # type: ignore[operator]
