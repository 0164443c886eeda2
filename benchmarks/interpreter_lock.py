"""What Python's interpreter lock costs a pipe whose devices each have a thread of one process: actions a second.

    python -m benchmarks.interpreter_lock

An action is the forward or backward of one stage and micro-batch; the stages do next to nothing, so what is measured is
the host's work. All figures are actions a second for each device, in steps of 1F1B; the times in which a device waits
because of the schedule, the bubble, do not count. For n devices:

    pipe          one pipe of n stages, as it runs: n threads, messages between them
    threads       n pipes of one stage, each stepped by a thread of its own: n threads that have nothing to do with each
                  other but the lock
    processes     n pipes of one stage, each in a process of its own: no common lock, on the same cores

Where the host had a core for each device and no lock, all would stay the same from 1 device to 8. What "processes"
loses with n are the cores; what "threads" loses beyond that is the lock; what "pipe" loses beyond "threads" are its
messages, and threads that wake each other. A CPU pipe of actions as small as these leaves its threads by itself
(`fxpipe/engines/local/thread_autotune.py`); that is turned off here.

The first table is of CPU workers. The others are of the device for tests (`tests/accelerator/`, with a C++ compiler),
an accelerator whose operations run on the host and are checked one by one, under one lock in C++ for all devices; on it
autograd has threads for the devices too. Its second table has operations that take a given time on their device, while
the host goes on: "device" is what the devices alone would reach, and "pipe" what the pipe does. Where both are alike,
the host keeps ahead of the devices, and the lock costs nothing. No table says how fast a GPU is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

import torch
from torch import Tensor

import fxpipe
from benchmarks.tables import Row, show
from benchmarks.timing import in_turn
from benchmarks.workload import Workload
from tests.accelerator import simulated_device

COUNTS = (1, 2, 4, 8)
CHUNKS = 32
CPU, SIMULATED = "cpu", simulated_device.KIND
DURATIONS = (1e-4, 5e-4, 2e-3)  # seconds of an operation on the device
Run = Callable[[], object]


def squares(output: Tensor) -> Tensor:
    return output.square().mean()


@contextmanager
def pipe_step(kind: str, devices: Sequence[int], chunks: int) -> Iterator[Run]:
    """A step of a pipe with a stage on each of these devices, which returns when the devices are done."""
    work = Workload(stages=len(devices), chunks=chunks, rows=1, width=4, depth=1)
    labels = [f"{kind}:{index}" for index in devices]
    splits = [str(stage) for stage in range(1, work.stages)]
    options: dict[str, Any] = {"schedule": "1f1b", "checkpoint": "never", "cut": splits}
    with closing(fxpipe.compile(work.model(), labels, chunks, **options)) as pipe:
        x = work.batch()[0].to(labels[0] if kind != CPU else CPU)
        pipe.step(x, loss_fn=squares)
        scheduler = pipe.scheduler

        def step() -> None:
            scheduler.step((x,), chunks, None)  # type: ignore[union-attr, call-arg]
            if kind != CPU:
                for label in labels:
                    torch.accelerator.synchronize(label)

        yield step


@contextmanager
def on_threads(kind: str, count: int, chunks: int) -> Iterator[Run]:
    """A step of each of `count` pipes of one stage, at the same time, on threads of this process."""
    with ExitStack() as stack:
        steps = [stack.enter_context(pipe_step(kind, [index], chunks)) for index in range(count)]
        pool = stack.enter_context(ThreadPoolExecutor(count))
        yield lambda: [future.result() for future in [pool.submit(step) for step in steps]]


@contextmanager
def on_processes(kind: str, count: int, chunks: int) -> Iterator[Run]:
    """The same, each in a process of its own."""
    context = get_context("spawn")
    pairs = [context.Pipe() for _ in range(count)]
    processes = [context.Process(target=serve, args=(there, kind, chunks), daemon=True) for _, there in pairs]
    for process in processes:
        process.start()
    ours = [here for here, _ in pairs]
    for _, there in pairs:
        there.close()  # so that a process that dies is noticed

    def step() -> None:
        for here in ours:
            here.send(True)
        for here in ours:
            here.recv()

    try:
        yield step
    finally:
        for here in ours:
            here.close()
        for process in processes:
            process.join()


def serve(calls: Connection, kind: str, chunks: int) -> None:
    """Take a step for each message."""
    prepare(kind)
    with pipe_step(kind, [0], chunks) as step:
        while True:
            try:
                calls.recv()
            except EOFError:
                return
            step()
            calls.send(True)


def prepare(kind: str) -> None:
    torch.set_num_threads(1)
    if kind != CPU:
        simulated_device.load()


WAYS = {"threads": on_threads, "processes": on_processes}


def rates(kind: str, counts: Sequence[int], chunks: int, rounds: int, steps: int) -> Iterator[Row]:
    """For each number of devices: actions a second and device, by the pipe, by threads and by processes."""
    for count in counts:
        with ExitStack() as stack:
            candidates = {"pipe": stack.enter_context(pipe_step(kind, range(count), chunks))}
            for name, make in WAYS.items():
                candidates[name] = stack.enter_context(make(kind, count, chunks))
            seconds = {name: median(times) for name, times in in_turn(candidates, rounds, steps).items()}
        slots = {"pipe": 2 * (chunks + count - 1)}
        yield count, *(round(slots.get(name, 2 * chunks) / time) for name, time in seconds.items())


def busy_rates(
    counts: Sequence[int], durations: Sequence[float], chunks: int, rounds: int, steps: int
) -> Iterator[Row]:
    """On the test device, for each number of devices, by the time that an operation takes: actions a second and device
    that the pipe has, and that the devices alone would have."""
    for count in counts:
        row: list[object] = [count]
        with pipe_step(SIMULATED, range(count), chunks) as step:
            for duration in durations:
                with simulated_device.durations(duration, 0.0):
                    torch.ops.simulated.reset()
                    step()
                    spans = simulated_device.spans()
                    seconds = median(in_turn({"pipe": step}, rounds, steps)["pipe"])
                    torch.ops.simulated.reset()
                work = sum(span.end - span.start for span in spans) / count
                row += [round(2 * (chunks + count - 1) / seconds), round(2 * chunks / work)]
        yield tuple(row)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What the interpreter lock costs threads that have a device each.")
    parser.add_argument("--devices", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--chunks", type=int, default=CHUNKS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of each candidate in a round")
    parser.add_argument("--kinds", nargs="+", choices=(CPU, SIMULATED), default=(CPU, SIMULATED))
    options = parser.parse_args(arguments)
    lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"Python {sys.version.split()[0]} {'with' if lock else 'without'} interpreter lock, {os.cpu_count()} cores\n")
    reason = simulated_device.missing()
    simulated = SIMULATED in options.kinds and reason is None
    prepare(SIMULATED if simulated else CPU)  # before all backwards: autograd starts its threads at the first
    sizes = (options.devices, options.chunks, options.rounds, options.steps)
    if CPU in options.kinds:
        show("CPU workers: actions a second and device", ("devices", "pipe", *WAYS), rates(CPU, *sizes))
    if not simulated:
        print(f"Nothing was measured on the test device: {reason or 'it was not asked for'}.")
        return
    show("Test device: actions a second and device", ("devices", "pipe", *WAYS), rates(SIMULATED, *sizes))
    heads = [f"{name}, {1e3 * duration:g} ms" for duration in DURATIONS for name in ("pipe", "device")]
    counts, *rest = sizes
    rows = busy_rates(counts, DURATIONS, *rest)
    show("Test device, operations that take a time: actions a second and device", ("devices", *heads), rows)


if __name__ == "__main__":
    main()
