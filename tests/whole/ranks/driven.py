"""What ranks do in test_driven.py: torch's schedules run our stages, and the gradients are the plain model's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import fxpipe

SCHEDULES = {"gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2)}
CHUNKS, BATCH = 4, 8


class Skips(nn.Module):
    """Values that pass stages by, a mask, a number that depends on the batch, and tied weights at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        mask = (ids > 3)[..., None]
        skip = x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x)) * mask
            x = x.reshape(ids.shape[0], -1, 8) * scale
            if index == 3:
                x = x + skip
        return self.head(x)


def loss_fn(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), ids.flatten())


def example() -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(0, 11, (BATCH, 5), generator=torch.Generator().manual_seed(0))
    return ids, torch.linspace(0.5, 1.5, BATCH, dtype=torch.float64)[:, None, None], ids.roll(1)


def expected(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    ids, scale, target = example()
    loss = loss_fn(model(ids, scale), target)
    loss.backward()
    return loss.item(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def driven(group: Any, name: str) -> None:
    """Steps by this schedule, from a model on the meta device, of which each rank makes its own stages."""
    make_schedule, per_rank = SCHEDULES[name]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    with torch.device("meta"):
        plain, model = Skips(), Skips()
    fxpipe.materialize(plain, seed=1)
    loss, gradients = expected(plain)
    ids, scale, target = example()
    n, mine = size * per_rank, range(rank, size * per_rank, size)
    pipe = fxpipe.compile(model, devices=["cpu"] * n, chunks=CHUNKS, example_inputs=(ids, scale))
    pipe.materialize(seed=1, stages=mine)
    stages = pipe.torch_stages(mine, group=group)
    schedule = make_schedule(stages if per_rank > 1 else stages[0], CHUNKS, loss_fn)
    losses: list[Tensor] = []
    for _ in range(2):
        model.zero_grad()
        last = {"target": target, "losses": losses} if rank == size - 1 else {}
        schedule.step(*((ids, scale) if rank == 0 else ()), **last)
    for stage in stages:
        for key, parameter in stage.submod.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-9, atol=0)
    if rank == size - 1:
        torch.testing.assert_close(torch.stack(losses).mean().item(), loss, rtol=1e-9, atol=0)
    made = {key for key, parameter in model.named_parameters() if not parameter.is_meta}
    assert made == {key for stage in stages for key, _ in stage.submod.named_parameters()}
    pipe.close()
