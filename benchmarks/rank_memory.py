"""Memory of each process of a pipe over ranks: a rank keeps its own stages' tensors, and lets go of all others.

    python -m benchmarks.rank_memory

Each rank makes the whole model, as a script does, and takes a step. Its resident memory is read before the model is
made, after that, and after the first step, without and with gradients. `share` is what its own tensors take.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, which reads it once

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn

import fxpipe

MIB = 2**20
FORMS = ("one rank a stage", "replicas", "ZeRO-3")


def resident() -> float:
    """The resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def model_of(mib: int, layers: int) -> nn.Sequential:
    """Square layers that take so many MiB together."""
    width = int((mib * MIB / layers / 4) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def rank(end: Connection, number: int, count: int, meet: str, mib: int, form: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meet, count), rank=number, world_size=count)
    torch.manual_seed(0)  # the same model and batch on all ranks
    warm_up(count)
    before = resident()
    model = model_of(mib, 2 * count)
    whole, x = resident(), torch.randn(8, model[0].in_features)
    pipe = compiled(model, x, count, form)
    pipe.step(x, target=x, loss_fn=F.mse_loss)
    after = resident()
    pipe.zero_grad()
    share = sum(local(p).numel() * p.element_size() for p in pipe.parameters()) / MIB
    end.send((number, share, whole - before, after - before, resident() - before))
    pipe.close()


def local(parameter: Any) -> torch.Tensor:
    found: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return found


def warm_up(count: int) -> None:
    """A small pipe: what the first one of a process loads is no part of the model."""
    x = torch.randn(4, 4)
    pipe = fxpipe.compile(nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))), count, 2)
    pipe.step(x, target=x, loss_fn=F.mse_loss)
    pipe.close()


def compiled(model: nn.Module, x: torch.Tensor, count: int, form: str) -> Any:
    options: dict[str, Any] = {} if form == FORMS[0] else {"replicas": (count // 2, count - count // 2)}
    if form != FORMS[2]:
        return fxpipe.compile(model, count, 2, schedule="1f1b", example_inputs=x, **options)
    with torch.device("meta"):
        draft = model_of(1, len(list(model.children())))
    made = fxpipe.compile(draft, count, 2, schedule="1f1b", example_inputs=x[:, : draft[0].in_features], **options)
    plan = replace(made.plan, optimizer_sharding="zero3")
    made.close()
    return fxpipe.compile(model, plan=plan, example_inputs=x)


def measure(mib: int, count: int, form: str) -> list[list[float]]:
    """A row for each rank."""
    context = get_context("spawn")
    ends = [context.Pipe() for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        meet = str(Path(folder) / "meet")
        processes = [
            context.Process(target=rank, args=(theirs, number, count, meet, mib, form))
            for number, (_, theirs) in enumerate(ends)
        ]
        for process in processes:
            process.start()
        for _, theirs in ends:
            theirs.close()
        rows = [list(ours.recv()) for ours, _ in ends]
        for process in processes:
            process.join()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_memory", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="of the model")
    parser.add_argument("--ranks", type=int, default=4)
    asked = parser.parse_args()
    head = ["rank", "share", "model made", "after a step, with gradients", "without gradients"]
    for form in FORMS:
        print(f"{form}, {asked.mib} MiB over {asked.ranks} ranks; MiB of resident memory over an empty pipe's")
        print(tabulate(measure(asked.mib, asked.ranks, form), headers=head, floatfmt=".0f"), flush=True)


if __name__ == "__main__":
    main()
