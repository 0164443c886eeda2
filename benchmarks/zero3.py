"""Two ways to shard parameters: fxpipe's over replicas, op by op (a plan with ZeRO-3), and FSDP2's over the rows of a
mesh of pipes, for a step (`fully_shard`). Beside both stands a mesh that does not (DistributedDataParallel).

    python -m benchmarks.zero3
    python -m benchmarks.zero3 --ranks 4 --chunks 8 --width 1024

With n ranks there are n/2 stages. Each has two replicas, or the mesh two rows. All forms have the same batch, micro-
batches of the same size on each rank, and Adam. Steps are timed in turn, in one set of processes; memory is read in
other ones, with one form each.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import accumulate
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, which reads it once

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

import fxpipe
from benchmarks.rank_memory import MIB, local, warm_up
from benchmarks.timing import in_turn
from fxpipe.demo.transformer import Layer

ROWS = 2  # replicas of a stage, or rows of the mesh
# What a rank sends in a call of gloo over two ranks, as a share of the tensor that the profiler names. gloo has no
# reduce-scatter: torch makes it of an all-reduce.
SENT = {"gloo:send": 1, "gloo:all_gather": 1, "gloo:all_reduce": 1, "gloo:reduce_scatter": 1}
MESSAGES = {"gloo:send": 1, "gloo:all_gather": 1, "gloo:all_reduce": 2, "gloo:reduce_scatter": 1}


@dataclass(frozen=True)
class Task:
    """`depth` transformer layers of so many `width`, and a batch of `samples` sequences, over `ranks`."""

    ranks: int
    chunks: int
    width: int
    depth: int
    samples: int
    length: int

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Layer(self.width, heads=4) for _ in range(self.depth)))

    def batch(self) -> Tensor:
        torch.manual_seed(1)
        return torch.randn(self.samples, self.length, self.width)


@dataclass(frozen=True)
class Answer:
    """Of one rank.

    - `messages`: how many it sends to replicas in a step; `sent`: their bytes.
    - `kept`: the bytes of its parameters and the optimizer's state, between two steps.
    - `most`: the same and the bytes of all tensors that a step makes, when it has most of them.
    - `resident`: the most resident memory in a step, in MiB, over an empty pipe's. With what malloc keeps.
    """

    messages: int
    sent: float
    kept: int
    most: int
    resident: float


# The forms ------------------------------------------------------------------------------------------------------------


def ddp(part: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(part, device_mesh=mesh, gradient_as_bucket_view=True)


def fsdp(part: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in part.modules():
        if isinstance(module, Layer):
            fully_shard(module, mesh=mesh)
    return fully_shard(part, mesh=mesh)


def meshed(task: Task, function: Callable[[nn.Module, DeviceMesh], nn.Module]) -> tuple[Any, Tensor]:
    """A row of a mesh of pipes, and its part of the batch."""
    mesh = init_device_mesh("cpu", (ROWS, task.ranks // ROWS), mesh_dim_names=("dp", "pp"))
    mine = task.batch().chunk(ROWS)[mesh.get_local_rank("dp")]
    pipe = fxpipe.compile(task.model(), chunks=task.chunks, schedule="1f1b", group=mesh["pp"], example_inputs=mine)
    pipe.parallelize(mesh["dp"], function)
    return pipe, mine


def planned(task: Task) -> tuple[Any, Tensor]:
    """A pipe with replicas by a plan with ZeRO-3, and the batch."""
    x, counts = task.batch(), (ROWS,) * (task.ranks // ROWS)
    draft = fxpipe.compile(task.model(), task.ranks, task.chunks, replicas=counts, schedule="1f1b", example_inputs=x)
    plan = replace(draft.plan, optimizer_sharding="zero3")
    draft.close()
    return fxpipe.compile(task.model(), plan=plan, example_inputs=x), x


FORMS: Mapping[str, Callable[[Task], tuple[Any, Tensor]]] = {
    "DistributedDataParallel": lambda task: meshed(task, ddp),
    "fully_shard": lambda task: meshed(task, fsdp),
    "ZeRO-3 of a plan": planned,
}


# A rank ---------------------------------------------------------------------------------------------------------------


class Trainer:
    """A form on one rank. Calling it is a step of training."""

    def __init__(self, form: str, task: Task) -> None:
        self.pipe, self.x = FORMS[form](task)
        self.optimizer = torch.optim.Adam(self.pipe.parameters())

    def backward(self) -> None:
        self.pipe.step(self.x, target=self.x, loss_fn=F.mse_loss)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __call__(self) -> None:
        self.backward()
        self.update()

    def answer(self, before: float) -> Answer:
        """What is asked of memory and messages, after steps."""
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident memory from now on
        self()
        resident = highest() - before
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        kept = sum(local(x).nbytes for x in (*self.pipe.parameters(), *states))
        with profile(record_shapes=True, profile_memory=True) as seen:
            self()
        calls = [event for event in seen.events() if event.name in SENT]
        return Answer(
            sum(MESSAGES[call.name] for call in calls),
            sum(SENT[call.name] * bytes_of(call.input_shapes) for call in calls),
            kept,
            kept + most_allocated(seen),
            resident,
        )


def bytes_of(shapes: Sequence[Sequence[int]]) -> int:
    """Of float32. (The numbers with which replicas agree are larger, and too few to count.)"""
    return 4 * sum(torch.Size(shape).numel() for shape in shapes)


def most_allocated(seen: profile) -> int:
    """The most bytes that are allocated at a time, over those at the beginning."""
    events = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]
    return max(accumulate(one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())))


def highest() -> float:
    """The most resident memory of this process, in MiB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def serve(end: Connection, number: int, task: Task, meet: str, forms: Sequence[str]) -> None:
    """A rank's process: answers whoever asks for a step, or for an Answer (an empty name), until it is closed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meet, task.ranks), rank=number, world_size=task.ranks)
    torch.manual_seed(0)
    warm_up(task.ranks)
    before = highest()
    trainers = {form: Trainer(form, task) for form in forms}
    while True:
        try:
            form = end.recv()
        except EOFError:
            break
        end.send(trainers[form]() if form else trainers[forms[0]].answer(before))
    for trainer in trainers.values():
        trainer.pipe.close()


@contextmanager
def ranks(task: Task, forms: Sequence[str]) -> Iterator[Callable[[str], list[Any]]]:
    """Processes with these forms; gives what asks all of them."""
    context = get_context("spawn")
    ends = [context.Pipe() for _ in range(task.ranks)]
    with tempfile.TemporaryDirectory() as folder:
        meet = str(Path(folder) / "meet")
        processes = [
            context.Process(target=serve, args=(theirs, number, task, meet, forms), daemon=True)
            for number, (_, theirs) in enumerate(ends)
        ]
        for process in processes:
            process.start()
        for _, theirs in ends:
            theirs.close()

        def ask(form: str) -> list[Any]:
            for ours, _ in ends:
                ours.send(form)
            return [ours.recv() for ours, _ in ends]

        yield ask
        for ours, _ in ends:
            ours.close()
        for process in processes:
            process.join()


# The table ------------------------------------------------------------------------------------------------------------


def answer(task: Task, form: str) -> Answer:
    """Of the rank that has the most of each."""
    with ranks(task, [form]) as ask:
        ask(form)
        found: list[Answer] = ask("")
    return Answer(*(max(values) for values in zip(*map(astuple, found), strict=True)))


def table(task: Task, rounds: int) -> str:
    """A row for each form. Times are shares of `fully_shard`'s."""
    with ranks(task, [*FORMS]) as ask:
        seconds = in_turn({form: lambda form=form: ask(form) for form in FORMS}, rounds, 1)
    base = seconds["fully_shard"]
    rows = []
    for form, times in seconds.items():
        one = answer(task, form)
        ratio = median(a / b for a, b in zip(times, base, strict=True))
        rows.append((form, ratio, one.messages, one.sent / MIB, one.kept / MIB, one.most / MIB, one.resident))
    head = ("", "time", "messages", "MiB sent", "MiB kept", "in a step, at most", "resident")
    return tabulate(rows, headers=head, floatfmt=("", ".2f", ".0f", ".0f", ".0f", ".0f", ".0f"), tablefmt="github")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zero3", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=6, help="layers")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    for count in asked.ranks:
        for chunks in asked.chunks:
            task = Task(count, chunks, asked.width, asked.depth, asked.samples, asked.length)
            size = sum(p.nbytes for p in task.model().parameters()) / MIB
            print(f"\n{size:.0f} MiB of parameters, {count} ranks, {chunks} micro-batches:\n", flush=True)
            print(table(task, asked.rounds), flush=True)


if __name__ == "__main__":
    main()
