"""The device's checker: what nothing orders is an error that names operator, streams and line."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from .child_process import on_device
from .simulated_device import DisorderError, checked, durations, errors, spans, waits

pytestmark = pytest.mark.accelerator


def other_stream() -> torch.Stream:
    return torch.Stream(device="sim:0")


def ones() -> Tensor:
    return torch.ones(8, device="sim:0")


def read_too_early(ordered: bool) -> None:
    side, x = other_stream(), ones()
    if ordered:
        side.wait_stream(torch.accelerator.current_stream("sim:0"))
    with side:
        y = x + 1
    x.record_stream(side)
    torch.accelerator.current_stream("sim:0").wait_stream(side)
    del y


def write_too_early(ordered: bool) -> None:
    side, x = other_stream(), ones()
    side.wait_stream(torch.accelerator.current_stream("sim:0"))
    with side:
        y = x + 1
    if ordered:
        torch.accelerator.current_stream("sim:0").wait_event(side.record_event())
    x.fill_(2)
    del y
    torch.accelerator.current_stream("sim:0").wait_stream(side)


def freed_too_early(ordered: bool) -> None:
    side, x = other_stream(), ones()
    side.wait_stream(torch.accelerator.current_stream("sim:0"))
    with side:
        y = x + 1
    if ordered:
        x.record_stream(side)
    del x
    gc.collect()
    del y


def read_by_the_host(ordered: bool) -> None:
    x, host = ones(), torch.empty(8, pin_memory=True)
    host.copy_(x, non_blocking=True)
    if ordered:
        torch.accelerator.synchronize("sim:0")
    assert host.sum() == 8


def written_by_the_host(ordered: bool) -> None:
    x, host = ones(), torch.zeros(8, pin_memory=True)
    x.copy_(host, non_blocking=True)
    if ordered:
        torch.accelerator.current_stream("sim:0").record_event().synchronize()
    host.fill_(3)


FAULTS: dict[Callable[[bool], None], str] = {
    read_too_early: r"aten::add\S*, \S+test_checker.py:\d+ on stream 0:\d+ reads what aten::fill\S*, \S+ on stream 0:0",
    write_too_early: r"aten::fill\S*, \S+:\d+ on stream 0:0 writes what aten::add\S*, \S+:\d+ on stream 0:\d+ reads",
    freed_too_early: r"memory of stream 0:0 is freed .*test_checker.py:\d+\) while aten::add\S*, \S+ on stream 0:\d+",
    read_by_the_host: r"aten::sum, \S+:\d+ by the host reads memory that a copy from sim:0 to cpu, .* 0:0 writes",
    written_by_the_host: r"aten::fill_, \S+:\d+ by the host writes memory that a copy from cpu to sim:0, .* 0:0 reads",
}


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[fault.__name__ for fault in FAULTS])
@on_device
def test_a_fault_is_told(number: int) -> None:
    fault, message = list(FAULTS.items())[number]
    with pytest.raises(DisorderError, match=message), checked():
        fault(False)
    with checked():
        fault(True)


@on_device
def test_an_event_that_nobody_has_waited_for_has_no_time() -> None:
    start, end = (torch.Event("sim:0", enable_timing=True) for _ in range(2))
    start.record()
    ones()
    end.record()
    with pytest.raises(RuntimeError, match="Both events must be completed"):
        start.elapsed_time(end)
    end.synchronize()
    assert start.elapsed_time(end) >= 0


@on_device
def test_copies_between_devices_wait_for_both() -> None:
    with checked():
        x = torch.ones(8, device="sim:0")
        y = x.to("sim:1", non_blocking=True)
        assert (y + 1).cpu().sum() == 16
    assert len(waits()) == 1  # of .cpu()


@on_device
def test_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(8, device="sim:0") + torch.ones(8, device="sim:1")
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(8, device="sim:0") @ torch.ones(8)


@on_device
def test_backward_orders_its_streams() -> None:
    """autograd's engine waits for events and records streams as on CUDA."""
    with checked():
        x = torch.ones(4, 4, device="sim:0", requires_grad=True)
        side = other_stream()
        side.wait_stream(torch.accelerator.current_stream("sim:0"))
        with side:
            y = x @ x
        y.record_stream(torch.accelerator.current_stream("sim:0"))
        torch.accelerator.current_stream("sim:0").wait_stream(side)
        (y.to("sim:1") * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.cpu().sum() == 2 * 2 * 4**3


@on_device
def test_operations_take_the_time_they_are_given() -> None:
    with durations(0.02, 0.03), checked():
        x = ones()
        with other_stream():
            y = ones()
        start = torch.Event("sim:0", enable_timing=True)
        end = torch.Event("sim:0", enable_timing=True)
        start.record()
        x = x + 1
        x.cpu()
        end.record()
        end.synchronize()
        assert start.elapsed_time(end) >= 50
        first, second = (span for span in spans() if "fill" in span.what)
        assert first.stream != second.stream
        assert first.start < second.end
        assert second.start < first.end
        del y
    assert not errors()


@on_device
def test_memory_is_counted() -> None:
    torch.accelerator.reset_peak_memory_stats("sim:3")
    before = torch.accelerator.memory_allocated("sim:3")
    x = torch.empty(1000, device="sim:3")
    assert torch.accelerator.memory_allocated("sim:3") - before == 4000
    del x
    assert torch.accelerator.memory_allocated("sim:3") == before
    assert torch.accelerator.max_memory_allocated("sim:3") - before == 4000
