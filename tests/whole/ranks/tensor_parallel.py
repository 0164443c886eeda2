"""What ranks do in test_tensor_parallel_ranks.py: plans that cut ops over several ranks."""

from __future__ import annotations

import copy
import os
import signal
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import RankError
from fxpipe.api.search import operators_of
from fxpipe.engines.transports.collective_groups import FAILED_PART, CollectiveGroups, Exchange, mark, marks_of
from fxpipe.engines.transports.message_format import FailedElsewhere
from fxpipe.ir.cluster.published_clusters import preset
from fxpipe.ir.program.device_programs import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    REDUCE_SCATTER,
    GroupCall,
    check,
)
from fxpipe.ir.program.transfers import BACK
from fxpipe.pipe.ranks.process_group import find_world
from fxpipe.pipe.ranks.rank_pipe import RankPipe
from fxpipe.pipe.ranks.ranks import ranked
from fxpipe.planning.operators.expert_strategies import scattered
from tests.helpers.models import MODELS
from tests.helpers.transparency import build, inputs, on_cpu
from tests.pipe.build.test_apply_strategy import CASES, loss_of
from tests.training.test_checkpoint import Net, adam, batch, train
from tests.whole.ranks.cases import Boom, apart, at, raises, step_is_the_models, throw
from tests.whole.ranks.meshes import ddp, fsdp, rows_of
from tests.whole.ranks.parts import loops_alike, on_meta
from tests.whole.ranks.rendezvous import failing, like_nccl, no_memory
from tests.whole.test_placed import anywhere
from tests.whole.test_steps import stepped
from tests.whole.test_tensor_parallel import fast, loss, planned

FAR = "far"  # ranks that share no memory, over gloo
TIMEOUTS = {"": 60, FAR: 63}  # worlds are kept by their timeout


def over(group: Any, model: nn.Module, plan: Any, mode: str = "", **options: Any) -> RankPipe:
    """A pipe over ranks that share memory, or of another `mode`: FAR, or one of a group with NCCL's rules."""
    with apart(mode == FAR):
        fast = group if mode in ("", FAR) else like_nccl(group, mode)
        pipe = fxpipe.compile(model, plan=plan, group=fast, timeout=TIMEOUTS.get(mode, 60), **options)
        assert isinstance(pipe, RankPipe)
        assert bool(pipe.world.local_peers) == (mode != FAR)
    return pipe


def plan_is_the_model(group: Any, name: str, how: str, mode: str = "") -> None:
    """A step of this plan, and a call: the loss, outputs, all gradients and buffers are those of the model; nothing
    that ranks send can deadlock."""
    model, x, found = planned(name, how, dist.get_world_size(group))
    plain, count = copy.deepcopy(model), found.layers.micro_batches
    outputs = [plain(part) for part in x.tensor_split(count)]
    total: Any = sum(loss(part) / count for part in outputs)
    total.backward()
    found = replace(found, plan=replace(found.plan, optimizer_sharding="zero1"))  # each parameter has one owner
    pipe = over(group, model, found, mode)
    got = pipe.step(x, loss_fn=lambda output: loss(output), outputs=True)
    close(got, (total.detach(), torch.cat(outputs).detach()))
    check(pipe.programs)
    if name == "mlp":
        shares(pipe, mode, ALL_REDUCE)
    if name == "blocks":
        shares(pipe, mode, ALL_GATHER)
    wanted = dict(plain.named_parameters()) | dict(plain.named_buffers())
    for key, tensor in pipe.held_tensors().items():
        close(tensor.detach(), wanted[key].detach(), key)
        close(tensor.grad, wanted[key].grad, key)
    keys = [key for part in pipe.collect(list(pipe.state_dict())) for key in part]
    assert sorted(keys) == sorted(plain.state_dict())
    assert all(pipe.collect(len(pipe.held_tensors())))  # what ranks own is spread over them
    pipe.eval()
    close(pipe.forward_only(x), plain.eval()(x).detach())
    pipe.close()


def shares(pipe: RankPipe, mode: str, kind: str) -> None:
    """What all ranks of a group need is made in collectives, forward and backward, in groups that are made once, unless
    ranks share memory."""
    calls = [step.what for row in pipe.programs.rows for step in row if isinstance(step.what, GroupCall)]
    found = {(one.kind, one.messages[0].gradient) for one in calls}
    assert {(kind, False), (BACK[kind], True)} <= found
    assert f"# {kind} over ranks 0, 1" in pipe.files["scheduler.py"]
    assert bool(pipe.world.collectives.groups) == bool(mode)


def close(found: Any, wanted: Any, what: str = "") -> None:
    found, wanted = on_cpu((found, wanted))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")


def plan_of(model: nn.Module, x: Tensor, count: int, degree: int, **options: Any) -> fxpipe.Planned:
    """A plan of two micro-batches that cuts ops over `degree` of `count` ranks."""
    options = {"tensor_parallel": degree, "micro_batches": 2, "recompute": False, **options}
    return fxpipe.plan(model, fast(count), len(x), example_inputs=(x,), **options)


def kept(group: Any, folder: Path) -> None:
    """A model made on the meta device, all that users do around steps, a checkpoint with which other layouts and the
    plain model go on, and a package."""
    count = dist.get_world_size(group)
    model, plain = on_meta(), on_meta()
    plan = plan_of(Net(), batch(0), count, 2, planner="straight")
    pipe = over(group, model, plan, example_inputs=batch(0))
    loops_alike(model, pipe, plain)
    optimizer = adam(pipe)
    train(pipe, optimizer, range(2))
    assert not pipe._state.cache._told_loans  # ranks borrow what the plan says, in this kind of call as in the first
    fxpipe.save_checkpoint(folder / "checkpoint", pipe, optimizer, step=2)
    pipe.save(folder / "package")
    losses = train(pipe, optimizer, range(2, 5))
    with raises("a batch of 7 cannot be cut into 2 micro-batches of one size"):
        pipe.step(batch(0)[:7], target=batch(0)[:7], loss_fn=F.cross_entropy)
    told = pipe.step(batch(0)[:4], target=batch(0)[:4], loss_fn=F.cross_entropy, timeline=True)
    assert len(pipe.timeline.devices) == count
    assert "cpu:1" in pipe.explain()
    assert "cpu:1 kept for backward" in str(pipe.compare())
    assert "cpu:1" in str(pipe.diagnose())
    assert "all-reduce" in pipe.report(folder / f"{dist.get_rank(group)}.html").read_text()
    assert told == pipe.collect(told)[0]
    pipe.close()
    torch.manual_seed(dist.get_rank(group))
    other = plan_of(Net(), batch(0), count, count)
    line = fxpipe.compile(Net(), chunks=2, group=group, timeout=60, example_inputs=batch(0))
    for run in (over(group, Net(), other, example_inputs=batch(0)), line, plain):
        optimizer = adam(run)
        assert fxpipe.load_checkpoint(folder / "checkpoint", run, optimizer) == {"step": 2}
        torch.testing.assert_close(train(run, optimizer, range(2, 5)), losses, rtol=1e-9, atol=0)
    loaded = fxpipe.load(folder / "package", Net(), group=group, timeout=60)
    fxpipe.load_checkpoint(folder / "checkpoint", loaded)
    torch.testing.assert_close(
        loaded.step(batch(2), target=batch(2), loss_fn=F.cross_entropy).item(), losses[0], rtol=1e-9, atol=0
    )
    assert sum(loaded.collect(len(loaded.state_dict()))) == len(plain.state_dict())
    for run in (line, loaded):
        run.close()


class Dropping(nn.Module):
    """Draws random numbers between layers that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x + self.narrow(self.drop(torch.tanh(self.wide(x)))))  # type: ignore[no-any-return]


def draws_as_in_one_process(group: Any) -> None:
    """Random numbers are those of the same plan in one process, and the gradient of an input is there, too."""
    count = dist.get_world_size(group)
    x = torch.linspace(-1, 1, 64, dtype=torch.float64).view(8, 8)
    torch.manual_seed(0)
    model, here = Dropping(), Dropping()
    here.load_state_dict(model.state_dict())
    plan = plan_of(model, x, count, 2)
    wanted: list[Any] = [None]
    pipe = over(group, model, plan)
    if pipe.leads:
        alone = fxpipe.compile(here, ["cpu"] * count, plan=plan)
        wanted = [dropped(alone, x)]
        alone.close()
    dist.broadcast_object_list(wanted, group=group, group_src=0)
    found = dropped(pipe, x)
    close(found[:2], wanted[0][:2])
    for key, grad in found[2].items():
        close(grad, wanted[0][2][key], key)
    assert sum(pipe.collect(len(found[2]))) == len(wanted[0][2]) == 4
    pipe.eval()
    close(pipe.forward_only(x), here.eval()(x).detach())
    pipe.close()


def dropped(run: fxpipe.Pipe, x: Tensor) -> tuple[Tensor, Any, dict[str, Any]]:
    torch.manual_seed(5)
    given = x.clone().requires_grad_()
    loss = run.step(given, loss_fn=lambda output: output.pow(2).mean())
    return loss, given.grad, {key: parameter.grad for key, parameter in run.named_parameters()}


def ops_run_anywhere(group: Any, name: str, schedule: str, checkpoint: str) -> None:
    """Every op on a rank drawn at random: a step is the model's."""
    case, count = stepped(MODELS[name]), dist.get_world_size(group)
    model, twin = build(case), build(case)
    options: dict[str, Any] = {"reduce": "sum", **case.options, "schedule": schedule, "checkpoint": checkpoint}
    pipe = fxpipe.compile(twin, chunks=3, plan=anywhere(count, len(name)), group=group, timeout=60, **options)
    assert isinstance(pipe, RankPipe)
    for samples in (6, 3):
        step_is_the_models(group, pipe, case, (model, twin), samples, 3)
        check(pipe.programs)
    pipe.close()


def strategies_are_the_model(group: Any) -> None:
    """Strategies drawn at random, each by the gradients and the output of a step."""
    case, count = CASES["convolutional"], dist.get_world_size(group)
    plain, args = build(case), inputs(case, 4)[0]
    output = plain(*args)
    loss_of(output).backward()
    graph = operators_of(plain, preset("p100:4"), args, 2)
    for number in range(3):
        model = copy.deepcopy(plain)
        model.zero_grad()
        strategy = scattered(graph, count, Random(number))
        pipe = fxpipe.compile(
            model, chunks=2, plan=(graph, strategy), schedule="1f1b", checkpoint="never", reduce="sum",
            group=group, timeout=60,
        )  # fmt: skip
        close(pipe.step(*args, loss_fn=loss_of, outputs=True), (loss_of(output).detach(), output.detach()))
        for key, tensor in pipe.named_parameters():
            torch.testing.assert_close(tensor.grad, plain.get_parameter(key).grad, rtol=1e-9, atol=1e-9)
        pipe.close()


def rows_train_together(group: Any) -> None:
    """Two rows of a mesh, each with its half of the batch: gradients are averaged by DistributedDataParallel; what
    would cut parameters once more is refused."""
    mesh = rows_of("dp", "pp")
    model, x, _ = planned("mlp", "two stages of two")
    plain, plan = copy.deepcopy(model), plan_of(model, x[:4], 2, 2)
    pipe = over(mesh["pp"], model, plan, example_inputs=(x[:4],))
    with raises("cuts ops over ranks: return DistributedDataParallel(part, ...)"):
        pipe.parallelize(mesh["dp"], fsdp)
    pipe.close()
    pipe = over(mesh["pp"], copy.deepcopy(plain), plan, example_inputs=(x[:4],))
    pipe.parallelize(mesh["dp"], ddp)
    mine = x.chunk(2)[mesh.get_local_rank("dp")]
    pipe.step(mine, loss_fn=lambda output: loss(output))
    loss(plain(x)).backward()
    for key, parameter in pipe.named_parameters():
        close(parameter.grad, plain.get_parameter(key).grad, key)
    pipe.close()


def faults_are_told(group: Any, name: str, mode: str) -> None:
    """An action of a part fails, or there is no memory for a collective: all ranks hear of it, no gradient is added,
    and the next step is exact."""
    model, x, found = planned(name, "a stage of four")
    pipe = over(group, model, found, mode)

    def step() -> Tensor:
        total: Tensor = pipe.step(x, loss_fn=lambda output: loss(output))
        return total

    wanted, scheduler = step(), ranked(pipe._state.cache.live(pipe.build))
    gradients = {key: parameter.grad.clone() for key, parameter in pipe.named_parameters()}
    actions = [action for action in scheduler.steps.methods if action.micro_batch == 1]
    for action in actions[:: len(actions) // 4]:
        model.zero_grad()
        at(pipe, str(action), throw)
        here = scheduler.program.here(action.stage)
        with pytest.raises(Boom if here else RankError, match="boom"):
            step()
        assert all(parameter.grad is None for parameter in model.parameters())
    if mode:
        model.zero_grad()
        changes = ((CollectiveGroups, "space", no_memory),) if dist.get_rank(group) == 1 else ()
        with failing(changes, True), pytest.raises((RuntimeError, RankError), match="out of memory"):
            step()
        assert all(parameter.grad is None for parameter in model.parameters())
    close(step(), wanted)
    for key, parameter in pipe.named_parameters():
        close(parameter.grad, gradients[key], key)
    pipe.close()


def lose_one(group: Any, name: str, mode: str) -> None:
    """Rank 1 ends while the others wait for its part of a collective."""
    model, x, found = planned(name, "a stage of four")
    pipe = over(group, model, found, mode)

    def step() -> None:
        pipe.step(x, loss_fn=lambda output: loss(output))

    step()
    shares(pipe, mode, ALL_REDUCE if name == "mlp" else ALL_GATHER)
    at(pipe, "1F1", lambda: os.kill(os.getpid(), signal.SIGKILL))
    try:
        step()
    except RankError:
        with raises("start all ranks again"):
            step()
        raise


def odd_parts(group: Any) -> None:
    """Parts of which some ranks have none, or that need no gradient, and the memory of a group: what each rank gets."""
    rank, world = dist.get_rank(group), find_world(None, group, 64)
    world.make_groups([(0, 1), (1, 0)])
    made = dict(world.collectives.groups)
    world.make_groups([(1, 0)])
    assert world.collectives.groups == made  # once
    value = torch.arange(8.0, dtype=torch.float64).view(2, 4)
    whole, part = (torch.float64, (2, 4)), (torch.float64, (2, 2))
    for kind in COLLECTIVES:
        given, taken = part if kind == ALL_GATHER else whole, part if kind == REDUCE_SCATTER else whole
        form = Exchange(kind, 2, 1, given, taken, True)
        for owned in ((value, 2 * value), (value, None), (None, None), (value, FailedElsewhere)):
            parts: list[Any] = [one.chunk(2, 1)[at] if kind == ALL_GATHER and isinstance(one, Tensor) else one
                                for at, one in enumerate(owned)]  # fmt: skip
            own, failed = parts[rank], parts[rank] is FailedElsewhere
            rows = form.part(None if failed else own, world.device)
            mark(rows, FAILED_PART if failed else (False, own is not None, rank == 0 and own is not None))
            found = world.collectives.space(kind, rows, (0, 1))
            world.settle(world.begin_collective(kind, (0, 1), rows, found))
            if FailedElsewhere in owned:
                with pytest.raises(FailedElsewhere):
                    form.opened(found, marks_of(found), ())
                continue
            got = form.opened(found, marks_of(found), [1, 0])
            assert (got is None) == (owned == (None, None))
            if got is not None:
                whole_of = [torch.zeros(given[1], dtype=value.dtype) if one is None else one for one in parts]
                wanted = torch.cat(whole_of, 1) if kind == ALL_GATHER else whole_of[0] + whole_of[1]
                wanted = wanted.chunk(2, 1)[rank] if kind == REDUCE_SCATTER else wanted
                assert torch.equal(got, wanted), kind
                assert got.requires_grad
                assert (got.stride() == (1, 2)) == (kind != ALL_GATHER)
    with pytest.raises(ValueError, match=r"of type torch.float64 and shape \[4\] is to be added up"):
        Exchange(ALL_REDUCE, 2, 0, whole, whole, True).part(value[0], world.device)
