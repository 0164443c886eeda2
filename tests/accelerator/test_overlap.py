"""Copies run beside compute, and the host runs ahead: seen on the test device, where operations take a given time."""

from __future__ import annotations

from time import perf_counter

import pytest
import torch

import fxpipe

from .child_process import on_device
from .pipelines import THREE
from .simulated_device import checked, durations, spans, waits
from .test_pipes import Wide

pytestmark = pytest.mark.accelerator


@on_device
def test_copies_run_beside_compute_and_the_host_runs_ahead() -> None:
    pipe = fxpipe.compile(Wide(), THREE, 6, schedule="1f1b", checkpoint="never")
    x = torch.randn(24, 64, device="sim:0")
    pipe.step(x, loss_fn=lambda out: out.sum())
    with checked(), durations(0.02, 0.02):
        pipe.step(x, loss_fn=lambda out: out.sum())
        returned = perf_counter()
        assert waits() == [], waits()
        torch.accelerator.synchronize("sim:0")
        found = spans()
    end = max(span.end for span in found)
    assert returned < end, "the step returned when the devices were done"
    copies = [span for span in found if "a copy from sim" in span.what and "device_copy.py" in span.what]
    work = [span for span in found if span.stream.endswith(":0")]
    assert len(copies) == 2 * 2 * 6  # forward and back, over two cuts, for each micro-batch
    beside = [
        copy
        for copy in copies
        if any(
            one.stream.partition(":")[0] == copy.stream.partition(":")[0]
            and one.start < copy.end
            and copy.start < one.end
            for one in work
        )
    ]
    assert len(beside) >= len(copies) / 3, f"{len(beside)} of {len(copies)} copies run while their device computes"
    pipe.close()


@on_device
def test_a_timeline_waits_at_its_beginning_and_end_only() -> None:
    pipe = fxpipe.compile(Wide(), THREE, 3, schedule="1f1b")
    x = torch.randn(6, 64, device="sim:0")
    pipe.step(x, loss_fn=lambda out: out.sum())
    with checked():
        pipe.step(x, loss_fn=lambda out: out.sum(), timeline=True)
        assert len(waits()) == 2 * 3, waits()  # each device's
        assert all("step_timer.py" in wait for wait in waits()), waits()
    pipe.close()
