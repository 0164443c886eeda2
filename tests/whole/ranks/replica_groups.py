"""What ranks do in test_replicas.py: stages of which several ranks each run a slice of every micro-batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.pipe.ranks.rank_pipe import RankPipe
from tests.helpers.models import MODELS
from tests.helpers.transparency import build, on_cpu
from tests.training.test_checkpoint import Net, adam, batch, train
from tests.whole.ranks.cases import raises, step_is_the_models
from tests.whole.ranks.parts import loops_alike, on_meta, piped
from tests.whole.ranks.rendezvous import like_nccl
from tests.whole.test_numbers import assert_same, steps_are_the_models, twins
from tests.whole.test_steps import stepped

CHUNKS = 4  # of 7 samples: 2, 2, 2, 1; of 2 samples: 1, 1, so that most replicas have nothing to do


def is_the_model(group: Any, name: str, counts: Sequence[int], schedule: str, checkpoint: str) -> bool:
    """Whether steps of a few batch sizes can be, and then they are the model's; the replicas are equal to the last bit
    after each."""
    case = stepped(MODELS[name])
    model, twin = build(case), build(case)
    pipe = fxpipe.compile(
        twin, sum(counts), CHUNKS, schedule=schedule, checkpoint=checkpoint, replicas=counts, group=group, timeout=60,
        **case.options,
    )  # fmt: skip
    assert isinstance(pipe, RankPipe)
    try:
        for batch in (8, 7, 2):
            step_is_the_models(group, pipe, case, (model, twin), batch, CHUNKS)
            same(group, pipe)
        labels = next(stage.devices for stage in pipe.build.plan.stages if pipe.world.label in stage.devices)
        assert dist.get_process_group_ranks(pipe.replica_group) == [pipe.world.labels.index(label) for label in labels]
        dist.all_reduce(total := torch.ones(()), group=pipe.replica_group)
        assert total == len(labels)
    except PlanError as error:
        if "cannot be cut between samples" not in str(error):
            raise
        return False
    finally:
        pipe.close()
    return True


class Everything(nn.Module):
    """Two blocks that draw random numbers, normalise, count, and share a weight that is used in the stage between; one
    has a frozen and an unused parameter. Beside what it computes it returns its input, a number for all samples, and a
    value that is the same for all of them, which crosses between the stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Conv1d(6, 8, 1), nn.Conv1d(8, 6, 1), nn.Linear(2, 2)
        self.norm, self.other, self.drop = nn.BatchNorm1d(8), nn.BatchNorm1d(6), nn.Dropout(0.4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(()))
        self.second.bias.requires_grad = False
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        factor = self.scale.exp()
        h = self.drop(torch.tanh(self.norm(self.first(x))))
        self.seen.add_(h.detach().sum())
        y = self.second(h)
        wide = F.conv1d(y * factor, self.second.weight.transpose(0, 1)).tanh()
        z = self.other(F.conv1d(wide, self.second.weight))
        return self.drop(z) + x, x, (z * z).sum(), factor


def loss_of(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return (output[0] * target).sum() + output[2] + output[3]


def is_as_in_one_process(group: Any, folder: Path, counts: Sequence[int], schedule: str, deferred: bool) -> None:
    """Steps with an optimizer, over ranks and in one process: the same numbers, random ones too. Then a timeline, which
    has all ranks, and the saved package, which takes the same step."""
    rank = dist.get_rank(group)
    x, y = torch.linspace(-2, 3, 504, dtype=torch.float64).sin().view(2, 14, 6, 3)
    options: dict[str, Any] = {"schedule": schedule, "replicas": counts, "deferred_batch_norm": deferred}
    options |= {"cut": ["other"], "checkpoint": "always"}
    torch.manual_seed(0)
    here = Everything()
    torch.manual_seed(rank)  # each rank begins with other values; those of the first replica count
    model = Everything()
    if rank == 0:
        here.load_state_dict(model.state_dict())
    pipe = fxpipe.compile(model, sum(counts), CHUNKS, group=group, timeout=60, **options)
    assert isinstance(pipe, RankPipe)
    pipe.prepare(x)
    state: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(state, pipe.state_dict(), group)
    here.load_state_dict({key: value for part in state for key, value in part.items()})
    assert sum(map(len, state)) == len(here.state_dict())
    alone = fxpipe.compile(here, ["cpu"] * sum(counts), CHUNKS, **options) if rank == 0 else None
    optimizers = [torch.optim.SGD(run.parameters(), lr=0.01) for run in (pipe, alone) if run is not None]
    for turn, rows in enumerate((14, 9, 2)):
        found = []
        for run in (pipe, alone):
            torch.manual_seed(turn)
            given = x[:rows].clone().requires_grad_()
            if run is not None:
                found.append((run.step(given, target=y[:rows], loss_fn=loss_of, outputs=True), given.grad))
        told = [found[-1]]
        dist.broadcast_object_list(told, group=group, group_src=0)
        torch.testing.assert_close(found[0], told[0], rtol=1e-9, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        values = [here.state_dict()]
        dist.broadcast_object_list(values, group=group, group_src=0)
        for key, tensor in pipe.held_tensors().items():
            torch.testing.assert_close(tensor.detach(), values[0][key], rtol=1e-9, atol=1e-12, msg=key)
        same(group, pipe)
    pipe.save(folder)
    loaded = fxpipe.load(folder, Everything(), group=group, timeout=60)
    assert loaded.replica_group is pipe.replica_group
    loaded.load_state_dict(values[0])
    again = []
    for run in (pipe, loaded):
        torch.manual_seed(9)
        again.append(run.step(x, target=y, loss_fn=loss_of, timeline=True))
        assert len(run.timeline.devices) == sum(counts)
        assert {span.kind for span in run.timeline.spans} >= {"F", "B", "T", "A"}
    torch.testing.assert_close(*again, rtol=1e-9, atol=0)
    split = pipe.diagnose().measured
    assert all(isclose(sum(parts.values()), split.seconds) for parts in split.parts.values())
    loaded.close()
    pipe.close()


def kept(group: Any, folder: Path, counts: Sequence[int], others: Sequence[int]) -> None:
    """A model made on the meta device, all that users do around steps, and a checkpoint, with which other replicas and
    the plain model go on."""
    model, plain = on_meta(), on_meta()
    pipe = piped(group, model, example_inputs=batch(0), replicas=counts)
    assert isinstance(pipe, RankPipe)
    loops_alike(model, pipe, plain)
    same(group, pipe)
    optimizer = adam(pipe)
    train(pipe, optimizer, range(2))
    fxpipe.save_checkpoint(folder, pipe, optimizer, step=2)
    losses = train(pipe, optimizer, range(2, 5))
    pipe.close()
    torch.manual_seed(dist.get_rank(group))
    other = piped(group, Net(), example_inputs=batch(0), replicas=others)
    for run in (other, plain):
        optimizer = adam(run)
        assert fxpipe.load_checkpoint(folder, run, optimizer) == {"step": 2}
        torch.testing.assert_close(train(run, optimizer, range(2, 5)), losses, rtol=1e-9, atol=0)
    other.close()


def optimizer_is_sharded(group: Any, mode: str, folder: Path) -> float:
    """Steps of Adam whose state the replicas of a plan's stages share out: the model's, also after a checkpoint, with
    which another such pipe and the plain model go on. Returns the share of the state that this rank has."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here: it takes 2 s

    fast = like_nccl(group, mode) if mode else group
    torch.manual_seed(0)
    plain = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh()))).double()
    x, y = torch.randn(2, 12, 8, dtype=torch.float64)
    decided = fxpipe.compile(copy.deepcopy(plain), 4, CHUNKS, replicas=(2, 2), group=fast, example_inputs=x)
    plan = replace(decided.build.plan, optimizer_sharding="zero1", schedule="1f1b")
    decided.close()

    def piped() -> tuple[RankPipe, ZeroRedundancyOptimizer]:
        made = fxpipe.compile(copy.deepcopy(plain), plan=plan, group=fast, timeout=60, example_inputs=x)
        assert isinstance(made, RankPipe)
        return made, ZeroRedundancyOptimizer(made.parameters(), Adam, process_group=made.replica_group, lr=0.01)

    def trained(run: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            if isinstance(run, RankPipe):
                run.step(x, target=y, loss_fn=F.mse_loss)
            else:
                F.mse_loss(run(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def same_values(run: RankPipe) -> None:
        values = plain.state_dict()
        for key, tensor in run.held_tensors().items():
            torch.testing.assert_close(tensor.detach().cpu(), values[key], rtol=1e-9, atol=1e-12, msg=key)
        same(group, run)

    (pipe, optimizer), (other, again) = piped(), piped()
    rank, alone = dist.get_rank(group), Adam(plain.parameters(), lr=0.01)
    assert pipe.replica_group is other.replica_group
    assert dist.get_process_group_ranks(pipe.replica_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    for run, its in ((pipe, optimizer), (plain, alone)):
        trained(run, its)
    same_values(pipe)
    fxpipe.save_checkpoint(folder, pipe, optimizer)
    trained(pipe, optimizer)
    for loaded, its in ((other, again), (plain, alone)):
        for state in its.state.values():
            state.clear()
        fxpipe.load_checkpoint(folder, loaded, its)
        trained(loaded, its)
    for one in (pipe, other):
        same_values(one)
        one.close()

    def held(of: torch.optim.Optimizer) -> int:
        return sum(state[name].nbytes for state in of.state.values() for name in ("exp_avg", "exp_avg_sq"))

    assert held(again.optim) == held(optimizer.optim)
    return held(optimizer.optim) / sum(2 * parameter.nbytes for parameter in pipe.parameters())


def numbers_are_the_models(group: Any, counts: Sequence[int]) -> None:
    """Python numbers cross between ranks, and all ranks get those that leave."""
    model, plain = twins()
    pipe = fxpipe.compile(model, sum(counts), 3, schedule="1f1b", replicas=counts, group=group, timeout=60)
    steps_are_the_models(pipe, plain)
    assert_same(model, plain, pipe.held_tensors())
    pipe.close()


def refuse_scalers(group: Any, folder: Path) -> None:
    """A scaler or a number of steps that one rank alone has wrong, for a new kind of call and a known one."""
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    plain, x = copy.deepcopy(model), torch.randn(7, 6)
    (F.mse_loss(plain(x), x) * 16).backward()
    pipe = fxpipe.compile(model, 2, 3, schedule="1f1b", group=group, timeout=60)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        (
            {"scaler": torch.amp.GradScaler("cpu")},
            "so some ranks would skip an update that others make; use fxpipe.GradScaler(pipe, ...)",
        ),
        ({"accumulate": 0}, "accumulate is 0"),
    )

    def refuse(run: Any) -> None:
        for who in (0, 1):
            for options, text in wrong:
                with raises(f"rank {who}: " * (rank != who), text):
                    run.step(x, target=x, loss_fn=F.mse_loss, **(options if rank == who else {}))

    refuse(pipe)
    pipe.step(x, target=x, loss_fn=F.mse_loss)
    refuse(pipe)
    pipe.save(folder)
    loaded = fxpipe.load(folder, model, group=group)
    refuse(loaded)
    for run in (pipe, loaded):
        run.zero_grad()
        run.step(x, target=x, loss_fn=F.mse_loss, scaler=fxpipe.GradScaler(run, "cpu", init_scale=16.0))
        for path, tensor in run.held_tensors().items():
            torch.testing.assert_close(tensor.grad, plain.get_parameter(path).grad)
        run.close()


def same(group: Any, pipe: RankPipe) -> None:
    """What several ranks hold has the same values and gradients there; what is left out is somewhere else."""
    mine = on_cpu({path: (tensor.detach(), tensor.grad) for path, tensor in pipe.held_tensors().items()})
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    found: dict[str, Any] = {}
    for held in everyone:
        for path, (value, grad) in held.items():
            known, known_grad = found.setdefault(path, (value, grad))
            assert torch.equal(value, known), f"{path} differs"
            assert (grad is None) == (known_grad is None), f"the gradient of {path} is missing"
            assert grad is None or torch.equal(grad, known_grad), f"the gradient of {path} differs"
    assert sum(map(len, everyone)) > len(found)
