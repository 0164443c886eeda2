"""What ranks do in test_sharded_parameters.py: replicas that share out the parameters of their stage (ZeRO-3)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam

import fxpipe
from fxpipe.engines.ranks.replicas.shard_exchange import ShardExchange
from fxpipe.errors import FxpipeError, RankError
from fxpipe.ir.plan import plan_file
from fxpipe.pipe.ranks.rank_pipe import RankPipe
from fxpipe.runtime.autograd.gathered_parameters import Gathering
from tests.whole.ranks.cases import whole

CHUNKS = 3


class Net(nn.Module):
    """Layers, some of them frozen, in part or whole; a parameter that is a number, one that two stages use, one with
    fewer rows than replicas, and what `.T` and a view of a parameter are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(10, 10), nn.Linear(10, 10, bias=False), nn.Linear(10, 10)
        self.scale, self.row = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(1, 10))
        self.mixed = nn.Parameter(torch.randn(5, 2, 10))
        self.norm, self.last.weight = nn.LayerNorm(10), self.first.weight
        self.second.weight.requires_grad = False
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * self.scale + self.row
        h = h @ self.second.weight.T
        h = torch.tanh(self.norm(h) @ self.mixed.view(10, 10))
        return self.last(h) + F.linear(h, self.mixed.reshape(10, 10))


def layers(width: int = 10, count: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.Tanh()))).double()


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def sharded(
    group: Any, model: nn.Module, x: Tensor, counts: Sequence[int], schedule: str = "1f1b", checkpoint: str = "never"
) -> RankPipe:
    """A pipe of a copy of the model with these replicas, whose plan has ZeRO-3."""
    how: dict[str, Any] = {"replicas": counts, "schedule": schedule, "checkpoint": checkpoint, "example_inputs": x}
    decided = fxpipe.compile(copy.deepcopy(model), sum(counts), CHUNKS, group=group, **how)
    plan = replace(decided.build.plan, optimizer_sharding="zero3")
    decided.close()
    pipe = fxpipe.compile(copy.deepcopy(model), plan=plan, group=group, timeout=60, example_inputs=x)
    assert isinstance(pipe, RankPipe)
    return pipe


def step_is_the_models(group: Any, counts: Sequence[int], schedule: str, checkpoint: str) -> None:
    for model in (layers(), net()):
        plain, (x, y) = model, torch.randn(2, 14, 10, dtype=torch.float64)
        pipe = sharded(group, plain, x, counts, schedule, checkpoint)
        assert any(isinstance(p, DTensor) and p.placements[0].is_shard() for p in pipe.parameters()) == (
            len(next(stage.devices for stage in pipe.build.plan.stages if pipe.world.label in stage.devices)) > 1
        )
        for _ in range(2):
            given, own = (x.clone().requires_grad_() for _ in range(2))
            loss = pipe.step(given, target=y, loss_fn=F.mse_loss)
            truth = F.mse_loss(plain(own), y)
            truth.backward()
            torch.testing.assert_close(loss.cpu(), truth.detach(), rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(given.grad, own.grad, rtol=1e-9, atol=1e-12)
            compare_gradients(pipe, plain)
        pipe.close()


def compare_gradients(pipe: Any, plain: nn.Module) -> None:
    for path, tensor in pipe.held_tensors().items():
        mine, found = plain.get_parameter(path).grad, tensor.grad
        assert (mine is None) == (found is None), path
        if found is not None:
            torch.testing.assert_close(whole(found), mine, rtol=1e-9, atol=1e-12, msg=path)


def memory(group: Any, counts: Sequence[int]) -> tuple[float, float, float]:
    """The bytes that this rank has of its stages' parameters between steps, as a share of them all; the most that is
    gathered in a step, as a share of the largest layer; and the share of the gradients after it."""
    plain, (x, y) = layers(width=32, count=6), torch.randn(2, 12, 32, dtype=torch.float64)
    pipe = sharded(group, plain, x, counts)
    parameters = list(pipe.parameters())
    total = sum(p.numel() * p.element_size() for p in parameters)
    between = sum(x.untyped_storage().nbytes() for x in pipe.model.parameters())  # none: also those of others are gone
    between += sum(p.to_local().untyped_storage().nbytes() for p in parameters)
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    gradients = sum(p.grad.to_local().untyped_storage().nbytes() for p in parameters)
    gathered = pipe._state.processes.parallel.gathered
    assert gathered.now == 0
    largest = 8 * (32 * 32 + 32)
    pipe.close()
    return between / total, gathered.peak / largest, gradients / total


def around_steps(group: Any, folder: Path, counts: Sequence[int], others: Sequence[int]) -> None:
    """Evaluation, clipping, Adam, and a checkpoint with which other replicas and the plain model go on: the model's."""
    plain, (x, y) = layers(), torch.randn(2, 14, 10, dtype=torch.float64)
    pipe = sharded(group, plain, x, counts)
    alone, adam = Adam(plain.parameters(), lr=0.01), Adam(pipe.parameters(), lr=0.01)

    def trained(run: nn.Module, optimizer: Adam, steps: int) -> None:
        for _ in range(steps):
            if isinstance(run, RankPipe):
                run.step(x, target=y, loss_fn=F.mse_loss)
                norms.append(fxpipe.clip_grad_norm_(run, 0.05))
            else:
                F.mse_loss(run(x), y).backward()
                norms.append(nn.utils.clip_grad_norm_(run.parameters(), 0.05))
            optimizer.step()
            optimizer.zero_grad()

    def compare(run: RankPipe) -> None:
        for path, tensor in run.held_tensors().items():
            torch.testing.assert_close(whole(tensor.detach()), plain.get_parameter(path).detach(), rtol=1e-9, atol=0)

    norms: list[Tensor] = []
    trained(pipe, adam, 2)
    trained(plain, alone, 2)
    torch.testing.assert_close(norms[:2], norms[2:], rtol=1e-9, atol=0)
    compare(pipe)
    with torch.no_grad():
        torch.testing.assert_close(pipe.forward_only(x), plain(x), rtol=1e-9, atol=0)
    trained(pipe, adam, 1)
    trained(plain, alone, 1)
    compare(pipe)
    held = sum(state["exp_avg"].to_local().nbytes for state in adam.state.values())
    assert held == sum(p.to_local().nbytes for p in pipe.parameters())
    fxpipe.save_checkpoint(folder, pipe, adam, step=3)
    other = sharded(group, layers(), x, others)
    again = Adam(other.parameters())
    assert fxpipe.load_checkpoint(folder, other, again) == {"step": 3}
    fresh = layers()
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    fxpipe.load_checkpoint(folder, fresh, Adam(fresh.parameters()))
    for path, p in fresh.named_parameters():
        torch.testing.assert_close(p, plain.get_parameter(path), rtol=1e-9, atol=0)
    trained(other, again, 2)
    trained(plain, alone, 2)
    compare(other)
    other.load_state_dict(other.state_dict())
    compare(other)
    state = {path: tensor.detach() for path, tensor in plain.state_dict().items()}
    other.load_state_dict(state)
    compare(other)
    for run in (pipe, other):
        run.close()


def fails_and_goes_on(group: Any, counts: Sequence[int], failing: Sequence[tuple[str, int, int]]) -> None:
    """For each of `failing`, a step in which an op on one rank fails at its n-th call, forward or backward: an error on
    all ranks, and no gradient. Then steps are the model's."""
    plain, (x, y) = layers(), torch.randn(2, 14, 10, dtype=torch.float64)
    pipe, rank = sharded(group, plain, x, counts), dist.get_rank(group)
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    pipe.zero_grad()
    exchange = ShardExchange
    for what, who, number in failing:
        place, name = (Gathering, "__torch_function__") if what == "op" else (exchange, what)
        count, run = 0, getattr(place, name)

        def broken(*args: Any, number: int = number, run: Any = run, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > number:
                raise ArithmeticError("broken")
            return run(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            if rank == who:
                patch.setattr(place, name, broken)
            with pytest.raises(ArithmeticError if rank == who else RankError, match="broken"):
                pipe.step(x, target=y, loss_fn=F.mse_loss)
        assert all(p.grad is None for p in pipe.parameters())
    F.mse_loss(plain(x), y).backward()
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    compare_gradients(pipe, plain)
    pipe.close()


def refused(group: Any, counts: Sequence[int]) -> None:
    """What cannot be done is an error on all ranks, and the pipe goes on."""
    plain, (x, y) = layers(), torch.randn(2, 14, 10, dtype=torch.float64)
    pipe, rank = sharded(group, plain, x, counts), dist.get_rank(group)
    mine = rank > 0  # stage 1 has replicas
    with pytest.raises(FxpipeError, match="a micro-batch has 1 samples for 2 replicas" if mine else "rank [12]: "):
        pipe.step(x[:4], target=y[:4], loss_fn=F.mse_loss)
    with pytest.raises(FxpipeError, match="leave out autocast" if mine else "rank [12]: "):
        with torch.autocast("cpu"):
            pipe.step(x, target=y, loss_fn=F.mse_loss)
    with pytest.raises(FxpipeError, match="the plan shards parameters over replicas: leave out parallelize"):
        pipe.parallelize(None, lambda part, mesh: part)
    F.mse_loss(plain(x), y).backward()
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    compare_gradients(pipe, plain)
    plan = pipe.build.plan
    pipe.close()
    late = fxpipe.compile(layers(), plan=plan, group=group, timeout=60)
    with pytest.raises(FxpipeError, match="pass example_inputs to"):
        late.step(x, target=y, loss_fn=F.mse_loss)
    late.prepare(x)
    late.step(x, target=y, loss_fn=F.mse_loss)
    compare_gradients(late, plain)
    late.close()


def of_a_file(group: Any, folder: Path, counts: Sequence[int]) -> None:
    """A plan in a file, and a model that is made on the meta device; a timed step."""
    plain, (x, y) = layers(), torch.randn(2, 14, 10, dtype=torch.float64)
    decided = sharded(group, plain, x, counts)
    file = folder / f"{dist.get_rank(group)}.json"
    file.write_text(plan_file.dump(decided.build.plan, decided.build.graph))
    assert '"zero3"' in file.read_text()
    decided.close()
    model = layers().to("meta")
    pipe = fxpipe.compile(model, plan=file, group=group, timeout=60, example_inputs=x.to("meta"))
    assert isinstance(pipe, RankPipe)
    pipe.materialize(seed=3)
    plain = layers().to("meta")
    fxpipe.materialize(plain, seed=3)
    F.mse_loss(plain(x), y).backward()
    pipe.step(x, target=y, loss_fn=F.mse_loss, timeline=True)
    compare_gradients(pipe, plain)
    assert len(pipe.timeline.devices) == sum(counts)
    pipe.save(folder / "saved")
    pipe.close()
    fresh = layers().to("meta")
    fxpipe.materialize(fresh, seed=3)
    loaded = fxpipe.load(folder / "saved", fresh, group=group, timeout=60)
    loaded.step(x, target=y, loss_fn=F.mse_loss)
    compare_gradients(loaded, plain)
    loaded.close()
