"""Steps over two ranks, beside torch.distributed.pipelining over gloo: the same stages, in the same two processes.

    python -m benchmarks.distributed [--nccl] [--json FILE]

Ranks of one machine hand values to each other in memory that they share; as "far" they do what they would if they were
on two machines: TCP connections of their own for values of at most 256 KiB, as all are here, and gloo for larger ones.

With `--nccl` the ranks have a GPU each, or share the one there is, and all of it goes over NCCL.

The first table is of stages that do next to nothing: what an action costs, beyond what the rank computes that has most
to do (timed on both ranks at once, too, for they share the machine). The second is of stages that compute: how much
faster two ranks are than the plain loop on one. The third is of a U-Net whose skips go past stages, with several stages
on each rank, which the peer cannot be given: its stages hand values to the next one only.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy processes become ten times slower

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxpipe
from benchmarks.models import UNet
from benchmarks.timing import in_turn
from benchmarks.workload import Workload
from fxpipe.engines.transports.same_machine import SWITCH
from tests.whole.ranks import backends
from tests.whole.ranks.backends import device_here

RANKS = 2
PLAIN = "plain loop on one rank"
BUSIEST = "stages of the busiest rank alone"
PEER = "torch.distributed.pipelining"
OURS, OURS_FAR = "fxpipe", "fxpipe far"
SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}
TINY = Workload(stages=2 * RANKS, chunks=8, rows=4, width=16, depth=1)
LARGE = Workload(stages=2 * RANKS, chunks=16, rows=64, width=512, depth=2)
Step = Callable[[], Tensor | None]
Seconds = Mapping[str, list[float]]


# One step of each -----------------------------------------------------------------------------------------------------


def here(work: Workload) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    """The model and its batch, on the device of this rank."""
    x, y = work.batch()
    return work.model().to(device_here()), (x.to(device_here()), y.to(device_here()))


def waiting(step: Callable[[], object]) -> Callable[[], object]:
    """The step, until this rank's device is done."""

    def run() -> object:
        found = step()
        if device_here() == "cuda":
            torch.cuda.synchronize()
        return found

    return run


def plain(work: Workload) -> Step:
    """On rank 0; the other one waits."""
    model, (x, y) = here(work)

    def step() -> Tensor | None:
        loss = None
        if dist.get_rank() == 0:
            model.zero_grad()
            pairs = zip(x.split(work.rows), y.split(work.rows), strict=True)
            loss = sum((F.mse_loss(model(a), b) / work.chunks for a, b in pairs), start=torch.zeros(()))
            loss.backward()
        dist.barrier()
        return loss

    return step


def busiest(work: Workload) -> Callable[[], None]:
    """What the last rank computes, on both ranks at once: half of the layers and the loss, with nothing between."""
    whole, (x, y) = here(work)
    model = whole[work.stages // 2 :]
    pieces = [(a.detach().requires_grad_(), b) for a, b in zip(x.split(work.rows), y.split(work.rows), strict=True)]

    def step() -> None:
        model.zero_grad()
        for a, b in pieces:
            a.grad = None
            F.mse_loss(model(a), b).backward()

    return step


def ours(work: Workload, schedule: str, far: bool = False) -> tuple[Step, nn.Module]:
    model, (x, y) = here(work)
    os.environ[SWITCH] = str(int(not far))
    stages = work.stages if schedule == "interleaved" else RANKS
    cut = [str(k * work.stages // stages) for k in range(1, stages)]
    pipe = fxpipe.compile(
        model,
        RANKS,
        work.chunks,
        schedule=schedule,
        checkpoint="never",
        cut=cut,
        timeout=301 if far else 300,  # ranks meet once for each
    )

    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = pipe.step(x, target=y, loss_fn=F.mse_loss)
        return loss

    return step, model


def theirs(work: Workload, schedule: str) -> tuple[Step, nn.Module]:
    from torch.distributed import pipelining

    (model, (x, y)), rank = here(work), dist.get_rank()
    stages = work.stages if schedule == "interleaved" else RANKS
    each = work.stages // stages
    mine = [
        pipelining.PipelineStage(model[k * each : (k + 1) * each], k, stages, x.device)
        for k in range(rank, stages, RANKS)
    ]
    kind = getattr(pipelining, SCHEDULES[schedule])
    order = kind(mine if schedule == "interleaved" else mine[0], work.chunks, loss_fn=F.mse_loss)

    def step() -> Tensor | None:
        model.zero_grad()
        losses: list[Tensor] = []
        inputs = (x,) if rank == 0 else ()
        if rank == RANKS - 1:
            order.step(*inputs, target=y, losses=losses, return_outputs=False)
            return torch.stack([loss.detach() for loss in losses]).mean()
        order.step(*inputs, return_outputs=False)
        return None

    return step, model


def candidates(work: Workload) -> dict[str, Callable[[], object]]:
    """All of them, after a look at whether they compute the same gradients."""
    found: dict[str, Callable[[], object]] = {PLAIN: plain(work), BUSIEST: busiest(work)}
    for schedule in SCHEDULES:
        peer, model = theirs(work, schedule)
        peer()
        found[f"{PEER}, {schedule}"] = peer
        for name, far in ((OURS, False), (OURS_FAR, True))[: 1 if device_here() == "cuda" else 2]:
            own, same = ours(work, schedule, far)
            own()
            for p, q in zip(model.parameters(), same.parameters(), strict=True):
                if p.grad is not None:
                    assert q.grad is not None
                    torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-6)
            found[f"{name}, {schedule}"] = own
    return {name: waiting(step) for name, step in found.items()}


def unets(rows: int, size: int, width: int, chunks: int) -> dict[str, Callable[[], object]]:
    """A U-Net over two and over four stages, and the plain loop of it."""
    x = torch.randn(rows * chunks, 3, size, size, device=device_here())

    def loss_of(output: Tensor) -> Tensor:
        return output.square().mean()

    def alone() -> Tensor | None:
        if dist.get_rank() == 0:
            model.zero_grad()
            for part in x.split(rows):
                (loss_of(model(part)) / chunks).backward()
        dist.barrier()
        return None

    os.environ[SWITCH] = "1"
    torch.manual_seed(0)
    model, found = UNet(2, width, depth=2).to(device_here()), {PLAIN: alone}
    for schedule in ("1f1b", "interleaved"):
        torch.manual_seed(0)
        pipe = fxpipe.compile(UNet(2, width, depth=2), RANKS, chunks, schedule=schedule, checkpoint="never")

        def step(pipe: fxpipe.Pipe = pipe) -> Tensor:
            pipe.zero_grad()
            loss: Tensor = pipe.step(x, loss_fn=loss_of)
            return loss

        found[f"fxpipe, {schedule}"] = step
    return {name: waiting(step) for name, step in found.items()}


# Two processes --------------------------------------------------------------------------------------------------------


def serve(
    end: Connection, rank: int, meeting: str, rounds: int, works: Sequence[Workload], unet: Sequence[int], mode: str
) -> None:
    """Time everything together with the other rank; rank 0 tells what it found."""
    torch.set_num_threads(1)
    backends.start(mode, rank, RANKS, init_method=f"file://{meeting}")
    found: list[Seconds] = [in_turn(candidates(work), rounds, steps=5) for work in works]
    found.append(in_turn(unets(*unet), rounds, steps=1))
    end.send(found)
    dist.barrier()


def measure(rounds: int, works: Sequence[Workload], unet: Sequence[int], mode: str = "") -> list[Seconds]:
    """Seconds per step of each candidate, for each workload, and then for the U-Net."""
    context = get_context("spawn")
    ends = [context.Pipe() for _ in range(RANKS)]
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
        processes = [
            context.Process(target=serve, args=(end, rank, str(Path(folder) / "meet"), rounds, works, unet, mode))
            for rank, (_, end) in enumerate(ends)
        ]
        for process, (_, end) in zip(processes, ends, strict=True):
            process.start()
            end.close()
        found: list[Seconds] = ends[0][0].recv()
        for process in processes:
            process.join()
    return found


# Tables ---------------------------------------------------------------------------------------------------------------


def overhead_table(work: Workload, seconds: Seconds) -> str:
    """Microseconds per action, of a stage and micro-batch, forward or backward: all, and what is not computing. Of each
    the least, which other work on the machine disturbs least."""
    rows, compute = [], min(seconds[BUSIEST])
    for name, times in seconds.items():
        actions = 2 * work.chunks * (work.stages if "interleaved" in name else RANKS)
        peer = peer_of(name, seconds)
        over = (min(times) - compute) / actions * 1e6 if name not in (PLAIN, BUSIEST) else None
        rows.append(
            (
                name,
                f"{min(times) / actions * 1e6:.1f}",
                "" if over is None else f"{over:.1f}",
                f"{(min(times) - compute) / (min(peer) - compute):.2f}" if peer else "",
            )
        )
    headers = ("", "us per action", "overhead", "of the peer's")
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 3))


def speed_table(seconds: Seconds) -> str:
    """Milliseconds per step, and how much faster than the plain loop that is."""
    plain_loop = median(seconds[PLAIN])
    rows = [
        (name, f"{median(times) * 1e3:.1f}", f"{plain_loop / median(times):.2f}", part(name, seconds))
        for name, times in seconds.items()
    ]
    headers = ("", "ms per step", "speed-up", "of the peer's time")
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 3))


def part(name: str, seconds: Seconds) -> str:
    """Of the time of the peer with the same schedule."""
    peer = peer_of(name, seconds)
    return f"{median(seconds[name]) / median(peer):.2f}" if peer else ""


def peer_of(name: str, seconds: Seconds) -> list[float] | None:
    """The times of the peer with the same schedule, for one of ours."""
    whose, _, schedule = name.partition(", ")
    return seconds.get(f"{PEER}, {schedule}") if whose in (OURS, OURS_FAR) else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps over two ranks, beside torch.distributed.pipelining.")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rows", type=int, default=LARGE.rows, help="samples in a micro-batch of the second table")
    parser.add_argument("--nccl", action="store_true", help="over NCCL, on GPUs or on the one there is")
    parser.add_argument("--json", metavar="FILE", help="write all figures there, too")
    options = parser.parse_args()
    large, mode = replace(LARGE, rows=options.rows), backends.NCCL if options.nccl else ""
    if reason := backends.missing(mode):
        print(f"nothing was measured: it {reason}")
        return
    tiny, compute, unet = measured = measure(options.rounds, (TINY, large), (4, 64, 16, 8), mode)
    if options.json:
        Path(options.json).write_text(json.dumps(dict(zip(("tiny", "large", "unet"), measured, strict=True)), indent=1))
    print(f"stages that do next to nothing, {TINY.chunks} micro-batches\n\n{overhead_table(TINY, tiny)}")
    print(f"\nstages that compute, {large.chunks} micro-batches\n\n{speed_table(compute)}")
    print(f"\na U-Net with long skips, which {PEER} cannot be given\n\n{speed_table(unet)}")


if __name__ == "__main__":
    main()
