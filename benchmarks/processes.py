"""torch.distributed.pipelining as a trainer: a process for each stage, which sleeps until it is asked.

    this process ──"so many steps"──▶ process s       over a pipe; between orders a process is blocked on reading it,
    this process ◀──loss, gradients── process s       so that it takes nothing from whoever is timed meanwhile

The processes meet through a file, and move values and gradients between them with gloo.
"""

from __future__ import annotations

import gc
import io
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.workload import Trainer, Workload

SCHEDULES = ("GPipe", "1F1B")
GRADIENTS, TIDY = 0, -1  # orders: instead of so many steps


def pipelining(work: Workload, schedule: str) -> Trainer:
    """A trainer over `work.stages` new processes, in the schedule "GPipe" or "1F1B"."""
    context = get_context("spawn")
    folder = tempfile.TemporaryDirectory(prefix="gloo-")
    ends = [context.Pipe() for _ in range(work.stages)]
    processes = [
        context.Process(target=serve, args=(end, work, schedule, rank, str(Path(folder.name) / "meet")), daemon=True)
        for rank, (_, end) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    connections = [ours for ours, _ in ends]
    for _, theirs in ends:
        theirs.close()  # so that a process that dies ends what we read

    def ask(order: int) -> list[bytes]:
        for connection in connections:
            connection.send(order)
        return [connection.recv_bytes() for connection in connections]

    def close() -> None:
        for connection, process in zip(connections, processes, strict=True):
            connection.close()
            process.join()
        folder.cleanup()

    def run(steps: int) -> float:
        return float(ask(steps)[-1])

    def gradients() -> list[Tensor]:
        return [gradient for answer in ask(GRADIENTS) for gradient in torch.load(io.BytesIO(answer))]

    return Trainer(run, gradients, close, lambda: ask(TIDY))


def serve(connection: Connection, work: Workload, schedule: str, rank: int, meeting: str) -> None:
    """A stage's process: does what it is asked until nobody is there to ask. Garbage is collected when it is asked for:
    between rounds, when nobody is timed."""
    torch.set_num_threads(1)
    gc.disable()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=work.stages)
    stage = work.model()[rank]
    step = stepper(stage, work, schedule, rank)
    while (order := next_order(connection)) is not None:
        if order == GRADIENTS:
            connection.send_bytes(packed([p.grad for p in stage.parameters() if p.grad is not None]))
            continue
        if order == TIDY:
            gc.collect()
            connection.send_bytes(b"")
            continue
        loss = 0.0
        for _ in range(order):
            stage.zero_grad()
            loss = step()
        connection.send_bytes(str(loss).encode())
    dist.destroy_process_group()


def next_order(connection: Connection) -> int | None:
    try:
        return int(connection.recv())
    except EOFError:
        return None


def stepper(stage: torch.nn.Module, work: Workload, name: str, rank: int) -> Callable[[], float]:
    """One training step of this process's stage; the loss comes from the last stage, 0 from the others."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    kind = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[name]
    schedule = kind(PipelineStage(stage, rank, work.stages, torch.device("cpu")), work.chunks, loss_fn=F.mse_loss)
    x, y = work.batch()
    inputs = (x,) if rank == 0 else ()
    if rank + 1 < work.stages:

        def step() -> float:
            schedule.step(*inputs, return_outputs=False)
            return 0.0

        return step

    def last_step() -> float:
        losses: list[Tensor] = []
        schedule.step(*inputs, target=y, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().item()

    return last_step


def packed(tensors: list[Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getvalue()
