"""What ranks do in test_packages.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from tests.training.test_checkpoint import same
from tests.whole.ranks.cases import raises
from tests.whole.ranks.driven import Skips, example, loss_fn
from tests.whole.ranks.timelines import is_of


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Dropping()


class Dropping(Skips):
    """Draws random numbers, too."""

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        return F.dropout(super().forward(ids, scale), 0.1, self.training)


def steps(run: Any, group: Any) -> list[Any]:
    """Losses, gradients, norms and parameters of some steps; from the second on, each rank passes what it uses."""
    optimizer = torch.optim.AdamW(run.parameters(), lr=0.01)
    scaler = fxpipe.GradScaler(run, "cpu", init_scale=16.0)
    ids, scale, target = example()
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    found: list[Any] = []
    torch.manual_seed(3)
    for step in range(3):
        some = step > 0 and rank > 0
        given = (None if some else ids, scale)
        loss = run.step(*given, target=None if some and rank < last else target, loss_fn=loss_fn, scaler=scaler)
        scaler.unscale_(optimizer)
        found += [loss, fxpipe.clip_grad_norm_(run, 0.5)]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*found, {key: value.clone() for key, value in run.state_dict().items()}]


def saved(group: Any, folder: Path, alone: Path) -> None:
    """Steps of a pipe, whose package is saved; then those of the package, and of one that was saved in one process, are
    the same."""
    pipe = fxpipe.compile(model_of(0), chunks=4, schedule="1f1b", group=group, timeout=60)
    wanted = steps(pipe, group)
    pipe.save(folder)
    with raises("is not empty; choose another folder"):
        pipe.save(folder)
    for path in (folder, alone):
        loaded = fxpipe.load(path, model_of(0), group=group, timeout=60)
        same(steps(loaded, group), wanted)
        if path == folder:
            looked_at(pipe, loaded)
        loaded.close()
    pipe.eval()
    outputs = pipe.forward_only(*example()[:2])
    pipe.save(folder, overwrite=True)
    loaded = fxpipe.load(folder, pipe.model, group=group, timeout=60)
    same(loaded.forward_only(*example()[:2]), outputs)
    with raises("autograd does not reach from one process to another"):
        loaded(*example()[:2])
    loaded.close()
    pipe.close()


def looked_at(pipe: fxpipe.Pipe, loaded: Any) -> None:
    """A timeline, and calls that are of another kind on some ranks."""
    ids, scale, target = example()
    rank = dist.get_rank()
    loaded.step(ids, scale, target=target, timeline=True)
    is_of(pipe, loaded.timeline)
    for odd in (0, 1):
        more = {"more": 3} if rank == odd else {}
        with raises(f"rank {odd}: " * (rank != odd) + "this package was saved for another kind of call"):
            loaded.step(ids, scale, target=target, **more)
    with raises("saved for training"):
        loaded.eval().step(ids, scale, target=target)
    loaded.train().step(ids, scale, target=target)


def refused(group: Any, call: Path, edited: Path) -> None:
    """Packages that are not for several processes, not the same on all ranks, or not there on some."""
    rank = dist.get_rank(group)
    model = model_of(0)
    with raises("after a plain call of a pipe in one process: several ranks need one that was saved after pipe.step"):
        fxpipe.load(call, model, group=group)
    with raises("-    # edited on rank 0", "+    # edited on rank 1"):
        fxpipe.load(edited / str(rank), model, group=group)
    with raises("rank 1: " * (rank == 0), "is not a package that fxpipe has saved"):
        fxpipe.load(edited / str(2 * rank), model, group=group)


def refused_by_more(group: Any, folder: Path) -> None:
    """A package for fewer ranks."""
    with raises("the package is for 2 devices, cpu:0, cpu:1, and the ranks are 4, cpu:0, cpu:1, cpu:2, cpu:3"):
        fxpipe.load(folder, model_of(0), group=group)
