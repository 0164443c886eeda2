"""What ranks do in tests. Each function is called on all ranks of a group; rank 0 compares with the plain model."""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe import FxpipeError, RankError
from fxpipe.codegen.package.load_package import bound_stages, tensors_of
from fxpipe.codegen.package.package_files import constants
from fxpipe.codegen.scheduler.message_table import message_table
from fxpipe.engines.ranks.rank_engine import on_rank
from fxpipe.engines.ranks.rank_group import World
from fxpipe.engines.transports import shared_memory as board
from fxpipe.engines.transports import tcp_peer
from fxpipe.engines.transports.same_machine import SWITCH
from fxpipe.pipe.build import build as whole_build
from fxpipe.pipe.ranks import rank_builds
from fxpipe.pipe.ranks.process_group import find_world
from fxpipe.pipe.ranks.rank_pipe import RankPipe
from fxpipe.planning import homes
from fxpipe.runtime.random import new_seed
from tests.helpers.models import MODELS, Case
from tests.helpers.transparency import Result, assert_same, build, inputs, on_cpu
from tests.whole.test_steps import reference, stepped

Config = tuple[str, str]  # schedule, checkpoint
Step = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Own = Callable[[], Mapping[str, Tensor]]


# Ways -----------------------------------------------------------------------------------------------------------------


@contextmanager
def apart(far: bool = True) -> Iterator[None]:
    """Worlds that are made in this context share no memory with this process; give them a timeout of their own, for
    they are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, str(int(not far)))
        yield


def ways(group: Any) -> list[World]:
    """The ranks, on one machine; none on the machine of another; and the last one alone on its own."""
    found = []
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    for timeout, far in ((60, False), (61, True), (62, last)):
        with apart(far):
            world = find_world(None, group, timeout)
        assert world is not None
        assert len(world.local_peers) == [len(world.others), 0, 0 if last else len(world.others) - 1][timeout - 60]
        found.append(world)
    return found


# Comparing ------------------------------------------------------------------------------------------------------------


def step_over(group: Any, model: nn.Module, own: Own, call: Any, seed: int, step: Step) -> Result | None:
    """All that there is to compare after a step, on rank 0: the parts of all ranks, put together."""
    args, kwargs = call
    model.zero_grad()
    torch.manual_seed(seed)
    output = step(args, kwargs)
    mine = {id(tensor) for tensor in own().values()}
    gradients = {name: p.grad for name, p in model.named_parameters() if id(p) in mine}
    buffers = {name: b.clone() for name, b in model.named_buffers() if id(b) in mine}
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
    gradients |= {f"value of {name}": p.detach().clone() for name, p in model.named_parameters() if id(p) in mine}
    shown, inputs = on_cpu(((output, gradients, buffers), [leaf.grad for leaf in leaves]))
    part = Result(*shown), inputs
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, part, group)
    if dist.get_rank(group):
        return None
    names = [name for result, _ in parts for name in (*result.gradients, *result.buffers)]
    assert len(names) == len(set(names)), "a parameter or buffer is on two ranks"
    all_gradients = {name: grad for result, _ in parts for name, grad in result.gradients.items()}
    names = [name for name, _ in model.named_parameters()]
    all_gradients = {name: all_gradients[name] for name in (*names, *(f"value of {name}" for name in names))}
    for index, grads in enumerate(zip(*(found for _, found in parts), strict=True)):
        some = [grad for grad in grads if grad is not None]  # on each rank that has passed the input
        assert all(torch.equal(grad, some[0]) for grad in some)
        all_gradients[f"input {index}"] = some[0] if some else None
    all_buffers = {name: value for result, _ in parts for name, value in result.buffers.items()}
    for result, _ in parts[1:]:
        assert_same(Result(result.output, {}, {}), Result(parts[0][0].output, {}, {}), 0)
    return Result(parts[0][0].output, all_gradients, {name: all_buffers[name] for name, _ in model.named_buffers()})


def whole(tensor: Tensor) -> Tensor:
    """The tensor, put together if ranks have parts of it, on the CPU."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def compare(group: Any, got: Result | None, wanted: Callable[[], Result], tol: float = 1e-9) -> None:
    """Every rank learns whether rank 0 found all equal."""
    fault: list[str | None] = [None]
    if got is not None:
        try:
            assert_same(got, wanted(), tol)
        except AssertionError as error:
            fault = [str(error)]
    dist.broadcast_object_list(fault, group=group, group_src=0)
    assert fault[0] is None, fault[0]


# The whole way, from the user's call ----------------------------------------------------------------------------------


def step_is_the_models(
    group: Any, pipe: RankPipe, case: Case, models: tuple[nn.Module, nn.Module], batch: int, chunks: int,
    passes: bool = True,
) -> None:  # fmt: skip
    """A step of so many samples. `models`: the plain one, and its twin in the pipe; `passes`: whether this rank passes
    the batch."""
    model, twin = models

    def step(args: Any, kwargs: Any) -> Any:
        args, kwargs = (args, kwargs) if passes else ((), {})
        return pipe.step(*args, loss_fn=case.loss, outputs=True, **kwargs)

    got = step_over(group, twin, pipe.own_tensors, inputs(case, batch), batch, step)
    compare(group, got, lambda: reference(case, model, batch, chunks), case.tol)


def pipe_is_the_model(
    group: Any, name: str, schedule: str, checkpoint: str, chunks: int, given: str, backward: str = "autograd"
) -> None:
    """Steps of a few batch sizes through `fxpipe.compile`. `given`: "everywhere", or "used" where each rank passes only
    what it cannot do without, from the second step on."""
    case = stepped(MODELS[name])
    model, twin, rank = build(case), build(case), dist.get_rank(group)
    how = {"schedule": schedule, "checkpoint": checkpoint, "backward": backward, **case.options}
    pipe = fxpipe.compile(twin, chunks=chunks, group=group, timeout=60, **how)
    assert isinstance(pipe, RankPipe)
    try:
        for batch in (8, 7, 2):
            passes = given == "everywhere" or rank == 0 or any(item in used(pipe) for item in range(9))
            step_is_the_models(group, pipe, case, (model, twin), batch, chunks, passes)
        if backward == "code":
            assert all(stage.backward is not None for stage in pipe.build.program.stages)
        keys: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(keys, list(pipe.state_dict()), group)
        assert sorted(key for some in keys for key in some) == sorted(model.state_dict())
    finally:
        pipe.close()


def crowded_pipe_is_the_model(group: Any, name: str, schedule: str, small: int) -> None:
    """The same, where most values find no place in the memory that ranks share, and those of more than `small` bytes do
    not go by TCP."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board, "VALUES", 3)
        patch.setattr(tcp_peer, "SMALL", small)
        pipe_is_the_model(group, name, schedule, "except_last", 4, "everywhere")


def used(pipe: RankPipe) -> set[int]:
    """The numbers of the inputs that stages of this rank use; all of them before the first call."""
    if not pipe._state.cache.builds:
        return set(range(9))
    scheduler: Any = pipe.scheduler
    return {at for at, (name, _) in enumerate(scheduler.steps.inputs) if name in scheduler._used}


# What was captured and built before -----------------------------------------------------------------------------------


def step_of(made: whole_build.Build, package: Any, model: nn.Module, world: World) -> Step:
    """Steps of a loaded package over the ranks."""
    held = constants(made.program, made.whole)
    stages, *whole = bound_stages(package, model, held, here={world.label: world.device})
    scheduler = on_rank(package.Scheduler, stages, tuple(whole), world, message_table(made.program, made.schedule))

    def step(args: Any, kwargs: Any) -> Any:
        seed = new_seed() if scheduler.random else 0
        return package.result(*scheduler.run(package.inputs(*args, **kwargs), package.CHUNKS, seed=seed))

    return step


def owner(made: whole_build.Build, model: nn.Module, world: World) -> Own:
    """The tensors of the stages on this rank; on rank 0 also those of none."""
    tensors = tensors_of(model)
    found = {id(tensors[path]): made.plan.stages[s].device for path, s in homes(made.graph, made.plan).items()}
    first = world.labels[0]
    return lambda: {p: t for p, t in tensors_of(model).items() if found.get(id(tensors[p]), first) == world.label}


# Faults ---------------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """A stage for each rank, each with a bomb."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


SOON = 10  # seconds until all ranks know that something has failed


class Boom(Exception):
    """What a stage raises."""


def chain(
    group: Any, schedule: str, replicas: Sequence[int] | None = None, **options: Any
) -> tuple[RankPipe, nn.Module, tuple[Tensor, Tensor]]:
    """A pipe of a chain, and a batch for it."""
    size = dist.get_world_size(group)
    n = size if replicas is None else len(replicas)
    torch.manual_seed(0)
    model = Chain(n).double()
    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    cuts = [f"layers.{k}" for k in range(1, n)]
    pipe = fxpipe.compile(model, size, 4, schedule=schedule, cut=cuts, replicas=replicas, group=group, **options)
    assert isinstance(pipe, RankPipe)
    return pipe, model, (x, y)


def at(pipe: RankPipe, action: str, do: Callable[[], None], replica: int = 0) -> None:
    """Let this happen in an action, such as "1B2", if it is one of this rank, which is that replica."""
    scheduler: Any = pipe.scheduler
    found = next((a for a in scheduler.steps.methods if str(a) == action), None)
    if found is None or not scheduler.program.here(found.stage) or scheduler.program.replica != replica:
        return
    method = scheduler.steps.methods[found]

    def once(*args: Any) -> None:
        scheduler.steps.methods[found] = method
        do()
        method(*args)

    scheduler.steps.methods[found] = once


def throw() -> None:
    raise Boom("boom")


def fail_everywhere(group: Any, schedule: str, replicas: Sequence[int] | None = None) -> None:
    """One action after the other fails, on whatever rank it is, in the last replica of a stage; the next step is exact
    each time, and no rank waits for long."""
    pipe, model, (x, y) = chain(group, schedule, replicas, timeout=60)
    rank = dist.get_rank(group)

    def step() -> Tensor:
        found: Tensor = pipe.step(x, target=y, loss_fn=F.mse_loss)
        return found

    loss = step()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    scheduler: Any = pipe.scheduler
    for action in [a for a in scheduler.steps.methods if a.micro_batch in (0, 3)]:
        model.zero_grad()
        replica_group = scheduler.program.ranks[action.stage]
        at(pipe, str(action), throw, len(replica_group) - 1)
        home, began = replica_group[-1], time.monotonic()
        with pytest.raises(Boom if rank == home else RankError) as caught:
            step()
        assert time.monotonic() - began < SOON, f"{action} failed"
        where = f"stage {action.stage}, micro-batch {action.micro_batch}"
        where += f", replica {len(replica_group) - 1}" if len(replica_group) > 1 else ""
        if rank == home:
            assert caught.value.__notes__[0].startswith(where)
        else:
            assert f"rank {home}: Boom: boom\n{where}" in str(caught.value)
        assert all(p.grad is None for p in model.parameters()), f"gradients after {action} failed"
    torch.testing.assert_close(step(), loss, rtol=1e-9, atol=0)
    for name, p in model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(p.grad, wanted[name], rtol=1e-9, atol=0)
    pipe.close()


def differ(group: Any) -> None:
    """Each rank has another model, batch, mode or number of micro-batches: an error everywhere, which shows it."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    x, y = torch.randn(2, 8, 6)
    pipe = fxpipe.compile(Chain(n + (rank == 2)), n, 4, group=group)
    with raises("ranks 0 and 2 do not have the same model and plan", "+  parameter  layers_4_weight"):
        pipe.step(x, target=y, loss_fn=F.mse_loss)
    pipe = fxpipe.compile(Chain(n), n, 4 + (rank == 1), group=group)
    with raises("-chunks      4", "+chunks      5"):
        pipe.step(x, target=y, loss_fn=F.mse_loss)
    pipe = fxpipe.compile(Chain(n), n, 4, group=group)
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    with raises("rank 3 was given argument 0 of type torch.float32 and shape [6, 6], and rank 0"):
        pipe.step(x[:6] if rank == 3 else x, target=y, loss_fn=F.mse_loss)
    pipe.train(rank != 1)
    with raises("new on rank 1 alone"):
        pipe.step(x, target=y, loss_fn=F.mse_loss)
    pipe.train()
    with raises("rank 3: " * (rank != 3) + "target: not given on rank 3, whose stages use it"):
        pipe.step(x, target=y if rank == 0 else None, loss_fn=F.mse_loss)
    for _ in range(2):  # the second time after a step whose arguments look the same
        with raises("loss_fn is 3" if rank == 0 else "rank 0: loss_fn is 3"):
            pipe.step(x, target=y, loss_fn=3 if rank == 0 else F.mse_loss)
        with raises("rank 2: " * (rank != 2) + "loss_fn is 3"):
            pipe.step(x, target=y, loss_fn=3 if rank == 2 else F.mse_loss)
        pipe.step(x, target=y, loss_fn=F.mse_loss)
    loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
    assert abs(float(loss) - float(F.mse_loss(pipe.forward_only(x).cpu(), y))) < 1e-6
    with raises("devices is 3, and there are 4 ranks"):
        fxpipe.compile(Chain(n), 3, 4, group=group)


@contextmanager
def raises(*texts: str) -> Iterator[None]:
    """All these are in the message."""
    with pytest.raises(FxpipeError) as caught:
        yield
    missing = [text for text in texts if text not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def lose(
    group: Any,
    end: str,
    action: str = "1F2",
    replicas: Sequence[int] | None = None,
    far: Sequence[int] = (),
    timeout: float = 10,
) -> None:
    """Rank 1, which is the last replica of a stage, ends, or stands still, in the middle of a step; ranks that are far
    share no memory with others. The others' step ends soon after they know."""
    with apart(dist.get_rank(group) in far):
        pipe, _, (x, y) = chain(group, "1f1b", replicas, timeout=timeout)
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    at(
        pipe,
        action,
        lambda: os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[end]),
        replicas is not None,
    )
    began = time.monotonic()
    try:
        pipe.step(x, target=y, loss_fn=F.mse_loss)
    except RankError:
        assert time.monotonic() - began < (SOON if end == "kill" else max(SOON, 2 * timeout))
        with raises("start all ranks again"):
            pipe.step(x, target=y, loss_fn=F.mse_loss)
        raise


# Users ----------------------------------------------------------------------------------------------------------------


def train(group: Any) -> None:
    """Some steps of two batches each, beside the plain model."""
    rank = dist.get_rank(group)
    pipe, model, (x, y) = chain(group, "1f1b", example_inputs=torch.ones(8, 6, dtype=torch.float64))
    plain_model = Chain(4).double()
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == (36 + 6) * 8
    with raises(f"layers.{0 if rank else 1}.weight has no values in this process: it is on rank"):
        model(x)
    pipe.gather()
    plain_model.load_state_dict(model.state_dict())
    assert list(pipe.state_dict()) == [f"layers.{rank}.weight", f"layers.{rank}.bias"]
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (pipe, plain_model)]
    scaler = fxpipe.GradScaler(pipe, "cpu", init_scale=2.0**8)
    for turn in range(3):
        for half in (slice(0, 5), slice(5, 8)):
            loss = pipe.step(x[half], target=y[half], loss_fn=F.mse_loss, scaler=scaler, accumulate=3)
            wanted = F.mse_loss(plain_model(x[half]), y[half])
            (wanted / 3 * 2.0**8).backward()
            torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=0)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, plain_model.get_parameter(name).grad, rtol=1e-9, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=turn != 1)
    pipe.eval()
    torch.testing.assert_close(pipe.forward_only(x), plain_model(x).detach(), rtol=1e-9, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(pipe(x[:3]), plain_model(x[:3]), rtol=1e-9, atol=0)
    with raises("autograd does not reach from one process to another"):
        pipe(x)
    fresh = Chain(4).double().state_dict()
    pipe.load_state_dict(fresh)  # of a whole model
    assert all(torch.equal(value, fresh[key]) for key, value in pipe.state_dict().items())
    pipe.load_state_dict(pipe.state_dict())
    with pytest.raises(RuntimeError, match=r"missing \['layers\..\.bias'\]"):
        pipe.load_state_dict({f"layers.{rank}.weight": fresh[f"layers.{rank}.weight"]})


def mesh(group: Any) -> None:
    """Two pipes at once, each over one row of a mesh."""
    rows = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    model, (x, y) = Chain(4).double(), torch.randn(2, 8, 6, dtype=torch.float64)
    with raises("group is a mesh of 2 dimensions"):
        fxpipe.compile(model, 2, 4, group=rows)
    plan = fxpipe.compile(model, ["cpu:0", "cpu:1"], 4, schedule="1f1b", example_inputs=x).plan
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, 2, plan=plan, group=rows["pp"])
    half = slice(0, 4) if rows.get_local_rank("dp") == 0 else slice(4, 8)
    loss = pipe.step(x[half], target=y[half], loss_fn=F.mse_loss)
    torch.testing.assert_close(loss, F.mse_loss(plain(x[half]), y[half]).detach(), rtol=1e-9, atol=0)
    assert [stage.device for stage in pipe.plan.stages] == ["cpu:0", "cpu:1"]
    assert str(pipe.programs).startswith("1f1b on 2 devices\ncpu:0\n  run ")
    pipe.close()


def call_apart(group: Any, folder: Path) -> None:
    """Calls that only some ranks make: each rank hears at once which call the others are in, and goes on."""
    rank = dist.get_rank(group)
    pipe, model, (x, y) = chain(group, "1f1b", timeout=60)
    loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    calls: dict[str, Callable[[], Any]] = {
        "save_checkpoint": lambda: fxpipe.save_checkpoint(folder, pipe, optimizer),
        "clip_grad_norm_": lambda: fxpipe.clip_grad_norm_(pipe, 1.0),
        "collect": lambda: pipe.collect(3),
        "save": lambda: pipe.save(folder),
        "step": lambda: pipe.step(x, target=y, loss_fn=F.mse_loss),
        "forward": lambda: pipe.forward_only(x),
    }
    pipe.forward_only(x)
    began = time.monotonic()
    for alone in (0, 1):
        for one in calls:
            for other in ("step", "collect"):
                if one != other:
                    mine = one if rank == alone else other
                    with raises(f"rank {rank} is in {mine}" if rank in (0, alone) else " is in "):
                        calls[mine]()
    assert time.monotonic() - began < 30
    model.zero_grad()
    torch.testing.assert_close(pipe.step(x, target=y, loss_fn=F.mse_loss), loss, rtol=1e-9, atol=0)
    assert pipe.collect(rank) == list(range(dist.get_world_size(group)))
    pipe.close()


def compile_slowly(group: Any) -> None:
    """The leader takes longer to compile than a rank may be silent: no rank counts as lost; later ranks do."""
    for timeout, far in ((4.0, False), (4.5, True)):
        with apart(far), pytest.MonkeyPatch.context() as patch:
            made = rank_builds.build_here
            patch.setattr(rank_builds, "build_here", lambda *args, made=made: (time.sleep(8), made(*args))[1])
            pipe, _, (x, y) = chain(group, "1f1b", timeout=timeout)
            pipe.step(x, target=y, loss_fn=F.mse_loss)
            assert pipe.world.patience.total_seconds() == timeout
            pipe.close()


def target_on_the_last(group: Any) -> None:
    """A target that rank 0 is not given: all ranks hear that, whether the loss asks for one or not."""
    pipe, _, (x, y) = chain(group, "1f1b", timeout=60)
    rank = dist.get_rank(group)

    def of_itself(output: Tensor, target: Tensor | None = None) -> Tensor:
        return output.square().mean() if target is None else F.mse_loss(output, target)

    needs = "target is given on rank 1 and not on rank 0, which needs it, too"
    for loss_fn, text in ((F.mse_loss, "no target" if rank == 0 else needs), (of_itself, needs)):
        for _ in range(2):
            with raises(text) if rank or loss_fn is of_itself else pytest.raises(TypeError, match="missing"):
                pipe.step(x, loss_fn=loss_fn, **({"target": y} if rank else {}))
            loss = pipe.step(x, target=y, loss_fn=loss_fn)
    for run in (
        pipe,
        chain(group, "1f1b", timeout=60)[0],
    ):  # the shape is all that rank 0 needs, in its first call, too
        given = (None, y) if rank else (x, y.to("meta"))
        torch.testing.assert_close(run.step(given[0], target=given[1], loss_fn=F.mse_loss), loss, rtol=0, atol=0)
        run.close()


def different_batches(group: Any) -> None:
    """The argument and the ranks are named on all, no gradient is added, and the next step is right; what a rank is not
    given is not compared."""
    pipe, model, (x, y) = chain(group, "1f1b", timeout=60)
    rank = dist.get_rank(group)
    shuffled = x.flip(0) if rank == 2 else x
    for args, target, text in (
        (shuffled, y, "argument 0 has other values on rank 2 than on rank 0: all ranks of a pipe work on one batch"),
        (x, y + rank, "target has other values on ranks 1, 2 than on rank 0: "),
    ):
        with raises(text):
            pipe.step(args, target=target, loss_fn=F.mse_loss)
        assert all(p.grad is None for p in model.parameters())
    with raises("argument 0 has other values on rank 2 than on rank 0: "):
        pipe.forward_only(shuffled)
    unused = () if rank else (x,)
    loss = pipe.step(*unused, target=None if rank == 1 else y, loss_fn=F.mse_loss)
    pipe.close()
    again = fxpipe.compile(model, chunks=4, schedule="1f1b", group=group, timeout=60, check_inputs=False)
    torch.testing.assert_close(again.step(shuffled, target=y, loss_fn=F.mse_loss), loss)  # rank 2 uses the target alone
    again.close()


def fork(group: Any) -> None:
    """A child that each rank forks has no connections; those of its parent are as before."""
    torch.manual_seed(0)
    model, (x, y) = Chain(4).double(), torch.randn(2, 8, 6, dtype=torch.float64)
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, dist.get_world_size(group), chunks=4, group=group)
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with raises(f"forked from rank {dist.get_rank(group)}"):
                pipe.step(x, target=y, loss_fn=F.mse_loss)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
    torch.testing.assert_close(loss, F.mse_loss(plain(x), y).detach(), rtol=1e-9, atol=0)
    pipe.close()


def drop(group: Any) -> None:
    """A pipe that is dropped is gone at once: it does not wait until Python collects garbage."""
    model, (x, y) = Chain(4).double(), torch.randn(2, 8, 6, dtype=torch.float64)
    pipe = fxpipe.compile(model, dist.get_world_size(group), chunks=4, group=group)
    pipe.step(x, target=y, loss_fn=F.mse_loss)
    kept = [weakref.ref(part) for part in (pipe, pipe._state.processes, pipe._state.kinds, pipe._state.cache)]
    gc.collect()
    gc.disable()
    try:
        del pipe
        assert [part() for part in kept] == [None] * len(kept)
    finally:
        gc.enable()
