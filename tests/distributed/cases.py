"""What ranks do in tests. Each function is called on all ranks of a group; rank 0 compares with the plain model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe import street
from fxpipe.codegen.load import bound_stages, load_package, tensors_of, unload
from fxpipe.codegen.package import constants, write
from fxpipe.codegen.wires import wires
from fxpipe.engines.distributed import on_rank
from fxpipe.engines.world import World
from fxpipe.machine import local_cluster
from fxpipe.options import Options, every_device, stage_devices
from fxpipe.pipe import match, micro_batch_sizes
from fxpipe.planning import homes
from fxpipe.profiling import estimate
from fxpipe.ranks import RankPipe
from fxpipe.runtime.random import new_seed
from fxpipe.worlds import find_world
from tests.models import MODELS
from tests.test_steps import captured, reference, stepped
from tests.transparency import Result, assert_same, build, inputs

Config = tuple[str, str]  # schedule, checkpoint
Step = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Own = Callable[[], Mapping[str, Tensor]]


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
    part = Result(output, gradients, buffers), [leaf.grad for leaf in leaves]
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, part, group)
    if dist.get_rank(group):
        return None
    names = [name for result, _ in parts for name in (*result.gradients, *result.buffers)]
    assert len(names) == len(set(names)), "a parameter or buffer is on two ranks"
    all_gradients = {name: grad for result, _ in parts for name, grad in result.gradients.items()}
    all_gradients = {name: all_gradients[name] for name, _ in model.named_parameters()}
    for index, grads in enumerate(zip(*(found for _, found in parts), strict=True)):
        some = [grad for grad in grads if grad is not None]
        all_gradients[f"input {index}"] = sum(some[1:], start=some[0]) if some else None
    all_buffers = {name: value for result, _ in parts for name, value in result.buffers.items()}
    for result, _ in parts[1:]:
        assert_same(Result(result.output, {}, {}), Result(output, {}, {}), 0)
    return Result(output, all_gradients, {name: all_buffers[name] for name, _ in model.named_buffers()})


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


def pipe_is_the_model(group: Any, name: str, schedule: str, checkpoint: str, chunks: int, given: str) -> None:
    """Steps of a few batch sizes through `fxpipe.compile`. `given`: "everywhere", or "used" where each rank passes only
    what it cannot do without, from the second step on."""
    case = stepped(MODELS[name])
    model, twin, rank = build(case), build(case), dist.get_rank(group)
    pipe = fxpipe.compile(
        twin, chunks=chunks, schedule=schedule, checkpoint=checkpoint, group=group, timeout=60, **case.options
    )
    assert isinstance(pipe, RankPipe)
    try:
        for batch in (8, 7, 2):
            some = given == "used" and rank > 0 and not any(item in used(pipe) for item in range(9))

            def step(args: Any, kwargs: Any, some: bool = some) -> Any:
                args, kwargs = ((), {}) if some else (args, kwargs)
                return pipe.step(*args, loss_fn=case.loss, outputs=True, **kwargs)

            got = step_over(group, twin, pipe.own_tensors, inputs(case, batch), batch, step)
            compare(group, got, lambda batch=batch: reference(case, model, batch, chunks), case.tol)
        keys: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(keys, list(pipe.state_dict()), group)
        assert sorted(key for some in keys for key in some) == sorted(model.state_dict())
    finally:
        pipe.close()


def used(pipe: RankPipe) -> set[int]:
    """The numbers of the inputs that stages of this rank use; all of them before the first call."""
    if not pipe._builds:
        return set(range(9))
    scheduler: Any = pipe.scheduler
    return {at for at, (name, _) in enumerate(scheduler.inputs) if name in scheduler._used}


# Many configurations of one capture -----------------------------------------------------------------------------------


def engine_is_the_model(group: Any, name: str, configs: Sequence[Config], chunks: int, batches: Sequence[int]) -> int:
    """How many of the configurations run; each rank builds them all from one capture."""
    case = stepped(MODELS[name])
    world = find_world(None, group, 60)
    assert world is not None
    model, ran = build(case), 0
    wanted = {batch: reference(case, model, batch, chunks) for batch in batches} if world.leads else {}
    graph = captured(case, build(case), batches[0], chunks)
    given: dict[str, Any] = {}
    match(graph.call, inputs(case, batches[0]), given)
    flat = [given[item.name] for item in graph.inputs if item.path]
    for schedule, checkpoint in configs:
        labels = stage_devices(world.labels, schedule, None)
        if len(labels) > len(graph.ops):
            continue  # a stage has at least one
        twin = build(case)
        options = Options(labels, chunks, schedule=schedule, checkpoint=checkpoint, ranks=True)
        cluster, sizes = local_cluster(every_device(options)), micro_batch_sizes(graph, flat, chunks)
        made = street.build(graph, estimate(graph, sizes, cluster.device(labels[0])), sizes, cluster, options, None)
        with TemporaryDirectory() as folder:
            write(made.files, folder)
            package = load_package(folder)
        own, step = owner(made, twin, world), step_of(made, package, twin, world)
        for batch in batches:
            got = step_over(group, twin, own, inputs(case, batch), batch, step)
            compare(group, got, lambda batch=batch: wanted[batch], case.tol)
        unload(package)
        ran += 1
    return ran


def step_of(made: street.Build, package: Any, model: nn.Module, world: World) -> Step:
    """Steps of a loaded package over the ranks."""
    held = constants(made.program, made.totals)
    stages, whole = bound_stages(package, model, held, here={world.label: world.device})
    scheduler = on_rank(package.Scheduler, stages, whole, world, wires(made.program, made.schedule))

    def step(args: Any, kwargs: Any) -> Any:
        seed = new_seed() if scheduler.random else 0
        return package.result(*scheduler.run(package.inputs(*args, **kwargs), package.CHUNKS, seed=seed))

    return step


def owner(made: street.Build, model: nn.Module, world: World) -> Own:
    """The tensors of the stages on this rank; on rank 0 also those of none."""
    tensors = tensors_of(model)
    found = {id(tensors[path]): made.plan.stages[s].device for path, s in homes(made.graph, made.plan).items()}
    first = world.labels[0]
    return lambda: {p: t for p, t in tensors_of(model).items() if found.get(id(tensors[p]), first) == world.label}
