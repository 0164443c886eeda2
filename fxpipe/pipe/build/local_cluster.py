"""This machine as a cluster: its real memory, and speeds that are those of data sheets or assumed (`local_cluster`), or
measured (`detect`, in some seconds)."""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.codegen.package.load_package import worker_device
from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import ASSUMED_CPU_WORKER, Cluster, Device, Link, check
from fxpipe.ir.cluster.matrix_speed import MatrixSpeed
from fxpipe.ir.cluster.published_clusters import KNOWN
from fxpipe.runtime.accelerator import count, present, properties

BYTES = 2**25  # to copy: more than caches hold, but quick
SIDE = 1024  # of the matrices on a CPU
FAST_SIDE = 8192
FAST_SIDE_F64 = 2048  # many GPUs are 30 times slower in f64
CPU_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16}
FAST_DTYPES = {**CPU_DTYPES, "tf32": torch.float32, "f16": torch.float16}
F8_SINCE = (8, 9)  # the compute capability of the first GPUs that multiply f8


def local_cluster(labels: Sequence[str]) -> Cluster:
    """The devices with these labels, those whose data sheet is known as it says. CPU workers share the machine's
    memory, so each is given all of it."""
    cpu = replace(ASSUMED_CPU_WORKER, memory=cpu_memory())
    cluster = Cluster.of(labels, cpu=cpu)
    here = {device: properties(device) for device in present()}
    found = [(device, here.get(worker_device(device.label))) for device in cluster.devices]
    return replace(cluster, devices=tuple(device if one is None else _as_said(device, one) for device, one in found))


def _as_said(device: Device, found: Any) -> Device:
    """The device with the memory that torch tells, and the speeds of its data sheet, if that is known."""
    sheet = _published(found.name)
    if sheet is None:
        return replace(device, memory=found.total_memory)
    return replace(sheet, label=device.label, memory=found.total_memory, server=device.server)


def cpu_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def detect(workers: int | None = None) -> Cluster:
    """This machine as a cluster, measured in some seconds: its accelerators with the links between them; or CPU
    workers, which share cores and memory evenly, if there are no accelerators or `workers` is given.

    - `workers`: the number of CPU workers; if not given, one for each core.

    Floating-point operations per second are those of large matrix products, for each element type; bandwidths (bytes
    per second) are those of copies. A GPU whose data sheet fxpipe knows has the peaks of the sheet, and the efficiency
    that was measured; any other device has the measured speed as its peak. Raises PlanError if `workers` is below 1.
    """
    if workers is not None and workers < 1:
        raise PlanError(f"workers is {workers}; a machine has at least one CPU worker")
    cluster = _accelerators() if workers is None and count() else _cpu(workers or cores())
    check(cluster)
    return cluster


Cluster.detect = staticmethod(detect)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# CPU ----------------------------------------------------------------------------------------------------------------


def _cpu(workers: int) -> Cluster:
    """CPU workers that run at the same time: each has an equal share of the machine's memory and speed."""
    target, source = torch.empty(BYTES // 4), torch.ones(BYTES // 4)
    bandwidth = 2 * BYTES / least_seconds(lambda: target.copy_(source))
    speeds = tuple(MatrixSpeed(name, _cpu_flops(dtype) / workers) for name, dtype in CPU_DTYPES.items())
    flops = next(one.peak for one in speeds if one.dtype == "f32")
    each = Device(
        "cpu", cpu_memory() // workers, flops, bandwidth / workers, matrices=speeds, source="measured by detect"
    )
    devices = tuple(replace(each, label=f"cpu:{i}") for i in range(workers))
    # A tensor that goes to another worker is not copied: its reader loads it from memory.
    return Cluster(devices, (Link(("local", "local"), bandwidth / 2, _handover()),))


def _cpu_flops(dtype: torch.dtype) -> float:
    """Floating-point operations per second of a product on all cores that torch uses."""
    a = torch.ones(SIDE, SIDE, dtype=dtype)
    return 2 * SIDE**3 / least_seconds(lambda: torch.mm(a, a))


def least_seconds(run: Callable[[], object], budget: float = 0.2) -> float:
    """The shortest of several runs, which end after `budget` seconds."""
    least, start = float("inf"), perf_counter()
    for turn in range(50):
        begun = perf_counter()
        run()
        end = perf_counter()
        least = min(least, end - begun) if turn else least  # the first one warms up
        if turn and end - start > budget:
            break
    return least


def _handover(times: int = 200) -> float:
    """Seconds until another thread gets an item that was put into its queue."""
    there: queue.SimpleQueue[bool] = queue.SimpleQueue()
    back: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def answer() -> None:
        for _ in range(times):
            back.put(there.get())

    other = threading.Thread(target=answer, daemon=True)
    other.start()
    start = perf_counter()
    for _ in range(times):
        there.put(True)
        back.get()
    seconds = perf_counter() - start
    other.join()
    return seconds / (2 * times)


# Accelerators ---------------------------------------------------------------------------------------------------------


def _accelerators() -> Cluster:
    labels = list(map(str, present()))
    return Cluster(
        tuple(_accelerator(label) for label in labels), tuple(_link(a, b) for a, b in combinations(labels, 2))
    )


def _accelerator(label: str) -> Device:
    with torch.device(label):
        target, source = torch.empty(BYTES), torch.ones(BYTES)
    bandwidth = 2 * 4 * BYTES / _device_seconds(label, lambda: target.copy_(source))
    reached = {dtype: _flops(label, dtype) for dtype in FAST_DTYPES}
    found = properties(torch.device(label))
    if label.startswith("cuda") and (found.major, found.minor) >= F8_SINCE:
        reached["f8"] = _flops_f8(label)
    speeds = tuple(MatrixSpeed(dtype, flops) for dtype, flops in reached.items())
    measured = Device(label, found.total_memory, reached["f32"], bandwidth, "local", speeds, 1.0, "measured")
    return with_peaks(measured, found.name)


def with_peaks(measured: Device, name: str) -> Device:
    """The device with the peaks of the preset that its `name` tells, and the shares of them that were measured; as it
    is if there is no such preset. Presets are of modules on NVLink; cards for PCIe have other peaks.

    >>> from fxpipe.ir.cluster.published_clusters import V100
    >>> measured = Device("cuda:0", 1, 9e12, 810e9, matrices=(MatrixSpeed("f32", 12.56e12),))
    >>> found = with_peaks(measured, "Tesla V100-SXM2")
    >>> found.matrices, found.flops == V100.flops, found.memory_efficiency
    ((MatrixSpeed(dtype='f32', peak=15700000000000.0, efficiency=0.8),), True, 0.9)
    """
    known = _published(name)
    if known is None:
        return replace(measured, source=f"{name}, measured by detect")
    peaks = {one.dtype: one.peak for one in known.matrices}
    speeds = tuple(_share(one, peaks.get(one.dtype, one.peak)) for one in measured.matrices)
    whole = max(known.bandwidth, measured.bandwidth)
    return replace(
        measured,
        flops=known.flops,
        bandwidth=whole,
        matrices=speeds,
        memory_efficiency=measured.bandwidth / whole,
        source=f"{name}, data sheet and shares of it measured by detect",
    )


def _published(name: str) -> Device | None:
    """The preset that the name of a GPU tells."""
    words = set(re.split(r"[^A-Za-z0-9]", name))
    return None if words & {"PCIe", "PCIE", "NVL"} else next((one for one in KNOWN if one.label in words), None)


def _share(measured: MatrixSpeed, peak: float) -> MatrixSpeed:
    """The measured speed as a share of the peak; a device that is faster than its data sheet says has its own peak."""
    return MatrixSpeed(measured.dtype, max(peak, measured.peak), min(1.0, measured.peak / peak))


def _flops(label: str, dtype: str) -> float:
    """Floating-point operations per second of a product; torch's setting of tf32 is as it was, afterwards."""
    side, before = FAST_SIDE_F64 if dtype == "f64" else FAST_SIDE, torch.get_float32_matmul_precision()
    a = torch.ones(side, side, dtype=FAST_DTYPES[dtype], device=label)
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        return 2 * side**3 / _device_seconds(label, lambda: torch.mm(a, a))
    finally:
        torch.set_float32_matmul_precision(before)


def _flops_f8(label: str) -> float:
    a = torch.ones(FAST_SIDE, FAST_SIDE, device=label).to(torch.float8_e4m3fn)
    one, whole = torch.ones((), device=label), F.ScalingType.TensorWise

    def multiply() -> Tensor:
        return F.scaled_mm(a, a.t(), one, whole, one, whole)

    return 2 * FAST_SIDE**3 / _device_seconds(label, multiply)


def _link(a: str, b: str) -> Link:
    """The link between two accelerators: bandwidth of a large copy, latency of a copy of one number, each in the slower
    direction."""
    seconds, latency = 0.0, 0.0
    for source, target in ((a, b), (b, a)):
        large, there = torch.ones(BYTES, device=source), torch.empty(BYTES, device=target)
        seconds = max(seconds, _device_seconds(source, lambda: there.copy_(large)))  # noqa: B023
        latency = max(latency, _device_seconds(source, lambda: there[:1].copy_(large[:1])))  # noqa: B023
    return Link((a, b), 4 * BYTES / max(seconds - latency, 1e-9), latency)


def _device_seconds(label: str, run: Callable[[], object], times: int = 4) -> float:
    """Seconds of the shortest of several runs on the current stream of a device, by its events."""
    least, device = float("inf"), torch.device(label)
    with torch.accelerator.device_index(device.index):
        for turn in range(times):
            start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            least = min(least, start.elapsed_time(end) / 1e3) if turn else least
    return least
