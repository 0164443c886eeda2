"""Our stages, driven by torch's schedules, have the plain model's gradients."""

from __future__ import annotations

import copy
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import fxpipe
from fxpipe.errors import FxpipeError, PlanError
from fxpipe.pipelining import chain_stages
from tests.models import MODELS

RANKS, CHUNKS, BATCH = 2, 4, 8


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


def check(rank: int, make_schedule: Any, per_rank: int) -> None:
    """Steps by this schedule, from a model on the meta device, of which each rank makes its own stages."""
    with torch.device("meta"):
        plain, model = Skips(), Skips()
    fxpipe.materialize(plain, seed=1)
    loss, gradients = expected(plain)
    ids, scale, target = example()
    n = RANKS * per_rank
    pipe = fxpipe.compile(model, devices=["cpu"] * n, chunks=CHUNKS, example_inputs=(ids, scale))
    mine = range(rank, n, RANKS)
    pipe.materialize(seed=1, stages=mine)
    stages = pipe.torch_stages(mine)
    schedule = make_schedule(stages if per_rank > 1 else stages[0], CHUNKS, loss_fn)
    losses: list[Tensor] = []
    for _ in range(2):
        model.zero_grad()
        last = {"target": target, "losses": losses} if rank == RANKS - 1 else {}
        schedule.step(*((ids, scale) if rank == 0 else ()), **last)
    for stage in stages:
        for key, parameter in stage.submod.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[key], rtol=1e-9, atol=0)
    if rank == RANKS - 1:
        torch.testing.assert_close(torch.stack(losses).mean().item(), loss, rtol=1e-9, atol=0)
    assert {key for key, p in model.named_parameters() if not p.is_meta} == {
        key for stage in stages for key, _ in stage.submod.named_parameters()
    }
    pipe.close()


def rank_main(rank: int, store: str, results: Any) -> None:
    """All schedules in one world, for processes are slow to start."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for name, schedule, per_rank in SCHEDULES:
        try:
            check(rank, schedule, per_rank)
            results.put((name, rank, ""))
        except BaseException as error:
            results.put((name, rank, f"{type(error).__name__}: {error}"))
            raise
    dist.destroy_process_group()


SCHEDULES = [
    ("gpipe", ScheduleGPipe, 1),
    ("1f1b", Schedule1F1B, 1),
    ("interleaved", ScheduleInterleaved1F1B, 2),
]


def test_gradients_are_the_plain_models(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=rank_main, args=(rank, str(tmp_path / "store"), results)) for rank in range(RANKS)]
    try:
        for rank in ranks:
            rank.start()
        for _ in range(RANKS * len(SCHEDULES)):
            name, rank, wrong = results.get(timeout=120)
            assert not wrong, f"{name}, rank {rank}: {wrong}"
    finally:
        for process in ranks:
            process.join(20)
            process.kill()


# In one process -------------------------------------------------------------------------------------------------------

NAMES = ["set item", "numbers", "tied module", "batch norm", "pass through", "class token", "optional inputs"]


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_of_stages_is_the_model(name: str) -> None:
    """And what crosses is what torch was told."""
    case = MODELS[name]
    model = case.make().double()
    plain, (args, kwargs) = copy.deepcopy(model), case.inputs(4)
    pipe = fxpipe.compile(model, devices=3, chunks=1, **case.options)
    pipe.prepare(*args, **kwargs)
    given: Any = args
    for stage, _, after in chain_stages(pipe, range(3), torch.device("cpu")):
        given = stage(*given, **kwargs)
        crossed = given if isinstance(given, tuple) else (given,)
        assert [(x.shape, x.dtype, x.requires_grad) for x in crossed] == [
            (x.shape, x.dtype, x.requires_grad) for x in after
        ]
        assert stage.state_dict().keys() <= plain.state_dict().keys()
    case.loss(stage.made.result(*crossed)).backward()
    case.loss(plain(*args, **kwargs)).backward()
    for (key, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    pipe.close()


def test_what_no_chain_can_do() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(4, 4)
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    with pytest.raises(FxpipeError, match="nothing is compiled yet"):
        pipe.torch_stages([0])
    with pytest.raises(FxpipeError, match="it is not decided yet which stage has what"):
        pipe.materialize(stages=[0])
    pipe.step(x, target=x, loss_fn=F.mse_loss)
    with pytest.raises(FxpipeError, match=r"compiled for step\(\), in which the loss is part of the last stage"):
        pipe.torch_stages([0])
    pipe(x)
    with pytest.raises(PlanError, match="there is no stage 2: the pipe has stages 0 to 1"):
        pipe.torch_stages([2])
    pipe.close()
    pipe = fxpipe.compile(model.to("meta"), devices=2, chunks=2, example_inputs=x)
    with pytest.raises(
        FxpipeError, match=r"0.weight, of stage 0, is on the meta device; call pipe.materialize\(stages"
    ):
        pipe.torch_stages([0])
    pipe.close()
