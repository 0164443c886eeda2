"""The pipe in a world of torch.distributed: each rank has the stages of its own device, and all make the same calls.

    rank 0, the leader                        every other rank
    step(x, target=y)                         step(x, target=y), or only the arguments that its stages use
      │ capture: which kind of call?            │ capture, with meta tensors for what was left out
      ├─ header: number of the kind, seed ─────▶│
      │  a new one? all capture, compare graphs, and follow the leader's plan
      ▼                                         ▼
    its part of the step, the consensus       its part of the step, the consensus

`rank_calls` has how ranks make a call together, `rank_builds` the kinds of calls. A pipe may be a row of a mesh, side
by side with others: see `RankPipe.parallelize`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from fxpipe.codegen.package.load_package import tensors_of
from fxpipe.engines.ranks.rank_group import World
from fxpipe.errors import FxpipeError, PlanError, RankError
from fxpipe.pipe.build.build_cache import BuildCache
from fxpipe.pipe.drop_in_module import SHARED, NothingToTrain
from fxpipe.pipe.materialize import children_first
from fxpipe.pipe.options.compile_options import Options
from fxpipe.pipe.pipe import Pipe, PipeState
from fxpipe.runtime.interrupts import Interrupts, ignore
from fxpipe.schedules.make_schedule import AUTO

from .parallelize import Function, Parallel
from .process_group import number_pipe, replica_process_group
from .rank_arguments import CallArguments
from .rank_builds import RankBuilds
from .rank_calls import Header
from .rank_consistency import on_each
from .rank_tensors import RankTensors
from .ranks import Ranks, ranked, refuse_pickle, weakly
from .released_tensors import release, standing_in_for_released
from .replica_shards import ReplicaShards, faults, kept_whole, paths_in, stays_whole, with_shards
from .stage_module import Part


@dataclass(kw_only=True)
class RankPipeState(PipeState):
    """What a `RankPipe` has besides the model. `nothing`: among its parameters where it has none to train."""

    kinds: RankBuilds
    processes: Ranks
    tensors: RankTensors
    nothing: NothingToTrain = field(default_factory=lambda: NothingToTrain(torch.empty(0)))


class RankPipe(Pipe):
    """A `Pipe` whose devices are the processes of torch.distributed; what `fxpipe.compile` returns then.

    Every rank makes every call, for the same whole batch; unlike in DDP, ranks have no batches of their own. The
    leader, rank 0, passes all arguments; another rank passes those that its stages use, and may leave out the others or
    pass None: `pipe.step(target=y, loss_fn=loss_fn)` on the last rank. If one is missing, the error names it. `loss_fn`
    and `outputs` are the same on all ranks; `scaler`, `accumulate`, `timeline` and `rounds` are the leader's. Tensors
    that several ranks are given must have the same values: checksums are compared, unless `check_inputs=False`.

    Every rank gets the loss of the batch, and with `outputs` what the model returns; `pipe.timeline` is that of all
    ranks, by the leader's clock. Gradients are added to those of this rank's parameters, which `pipe.parameters()`
    returns after the first call or `example_inputs`. If an input requires a gradient, each rank that passed it gets it.
    `pipe(x)` raises FxpipeError where gradients are on: train with `step`, evaluate with `forward_only`. After
    `parallelize` with FSDP or tensor parallelism, all rows of the mesh make each call together.

    If anything fails on any rank, no gradient is added on any rank. The rank that failed raises its error; the others
    raise RankError, also if a rank is lost.
    """

    _state: RankPipeState
    __reduce__ = refuse_pickle

    def __init__(self, model: nn.Module, options: Options, world: World, check_inputs: bool = True) -> None:
        ranks = Ranks(world, check_inputs, weakly(self._refuse), weakly(self._release_others))
        kinds = RankBuilds(model, options, ranks)
        tensors = RankTensors(model, ranks, partial(replica_groups, kinds.cache))
        kinds.cache.owners.update(tensors.known_owners())
        ranks.sharding_pending = shards_parameters(options)
        super().__init__(
            model, options, RankPipeState(cache=kinds.cache, kinds=kinds, processes=ranks, tensors=tensors)
        )

    def _refuse(self, header: Header, signatures: CallArguments, error: BaseException) -> None:
        self._state.kinds.join_failed_call(header, signatures, error)

    def _release_others(self) -> None:
        self._state.tensors.release_others()

    @property
    def world(self) -> World:
        """The ranks of this pipe: `.group` is their ProcessGroup, `.rank` this rank's number in it, `.device` its
        device, `.labels` the labels of all devices."""
        return self._state.processes.world

    @property
    def place(self) -> int:
        """The number of this rank among all that train the model, those of pipes side by side included: the index of
        its value in `collect_all`."""
        return self._state.processes.place

    @property
    def replica_group(self) -> Any:
        """The ProcessGroup of torch.distributed of the ranks that have the same stages as this one, in the order of
        ranks; of this rank alone if its stages have no replicas. For an optimizer whose state they share out (ZeRO-1):

            optimizer = ZeroRedundancyOptimizer(
                pipe.parameters(), torch.optim.Adam, process_group=pipe.replica_group, lr=1e-3
            )

        All replicas read it, and make the group when they first do. Raises FxpipeError before the first call, which
        decides the stages, and RankError if a rank does not answer."""
        self.keys_here()  # raises if the stages are not decided
        cache, world = self._state.cache, self.world
        groups = (stage.devices for stage in cache.home.plan.stages) if cache.home else ()
        own = next((labels for labels in groups if world.label in labels), (world.label,))
        with self._state.processes.together():
            return replica_process_group(world, [world.labels.index(label) for label in own])

    def keys_here(self) -> Collection[str]:
        """The names of the parameters and buffers that this rank needs, those of `held_tensors`. Raises FxpipeError
        before the first call, which decides the stages."""
        if self._state.cache.home is None:
            raise FxpipeError("it is not decided yet which rank has which stage: pass example_inputs to fxpipe.compile")
        return self.held_tensors().keys()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of the stages on this rank, for an optimizer; all of them before the first call. A rank that
        has none to train gets an empty parameter, as torch's optimizers refuse an empty list."""
        found = [parameter for _, parameter in self.named_parameters(recurse=recurse)]
        yield from found
        if not any(parameter.requires_grad for parameter in found):
            yield self._state.nothing

    def close(self) -> None:
        """As `Pipe.close`. Another rank that calls the pipe after this raises RankError, soon."""
        with Interrupts(ignore):
            if not self._state.closed:
                self._state.processes.leave()
            super().close()

    def gather(self, to: int | Collection[int] | None = None) -> None:
        """Put the values of all ranks into the model on the ranks that `to` names, or on all: there `pipe.model` is the
        whole trained model, until the next call of the pipe, which lets go of what belongs to other ranks again. All
        ranks call this. The tensors are on the CPU where this rank does not hold them itself. Raises FxpipeError before
        the first call, which decides the stages, and RankError if a rank is lost, or names other ranks."""
        self.keys_here()  # raises if the stages are not decided
        ranks, world = self._state.processes, self.world
        wanted = {to} if isinstance(to, int) else {*range(len(world.labels))} if to is None else {*to}
        if unknown := sorted(wanted - {*range(len(world.labels))}):
            raise PlanError(f"to names rank {unknown[0]}: the ranks of this pipe are 0 to {len(world.labels) - 1}")
        agreed = self.collect(sorted(wanted), "gather")
        if any(one != agreed[0] for one in agreed):
            raise RankError(f"gather has other ranks in `to` on other ranks: {agreed}")
        with ranks.together():
            self._state.tensors.gather(wanted)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call `fn` for each module, children first, as `nn.Module.apply`, in every process alike. For the time of its
        call, a module has memory for tensors of its own that other ranks have: so random numbers, as those of
        `nn.init`, are drawn as for the whole model."""
        with self._state.lock:
            for _, module in children_first(self.model):
                with standing_in_for_released(module):
                    fn(self if module is self.model else module)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As of nn.Module, for all parameters of the model, in every process alike."""
        self.model.requires_grad_(requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RankPipe:
        """A new pipe of the same ranks, around a copy of the model, with each tensor on the same rank: for averages of
        weights, as by `AveragedModel(pipe)`. Its modules have the tensors of this rank alone."""
        cache = self._state.cache
        if self._state.processes.parallel is not None:
            raise FxpipeError("a pipe whose parameters are shared out over ranks (ZeRO-3, parallelize) is not copied")
        with self._state.processes.together():
            number_pipe(self.world)
        made = RankPipe(copy.deepcopy(self.model, memo), self.options, self.world, self._state.processes.checks_inputs)
        made._state.cache.follow(cache)
        part = Part(made.model, {id(tensor) for tensor in made.held_tensors().values()})
        for name in SHARED:
            object.__setattr__(made, name, vars(part)[name])
        return made

    @property
    def _shards(self) -> bool:
        """Whether the plan shards parameters over replicas."""
        return shards_parameters(self.options)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """As `Pipe.prepare`; with a plan with ZeRO-3, parameters are then sharded over the replicas of their stages, if
        they have values: `pipe.parameters()` are DTensors, and the model's own lose their memory."""
        super().prepare(*args, **kwargs)
        self._shard()
        self._state.tensors.release_others()

    def materialize(self, *args: Any, **kwargs: Any) -> None:
        """As `Pipe.materialize`; then, with a plan with ZeRO-3, parameters are sharded as by `prepare`."""
        super().materialize(*args, **kwargs)
        self._shard()
        self._state.tensors.release_others()

    def _shard(self) -> None:
        """Shard the parameters of stages with replicas, once, when all ranks have values for them."""
        cache, ranks, world = self._state.cache, self._state.processes, self.world
        if not ranks.sharding_pending or cache.home is None:
            return
        with ranks.together():
            held = self.held_tensors()
            if any(on_each(world.all_gather_object, lambda: any(x.is_meta for x in held.values()))):
                return
            stages = [stage for stage in cache.home.plan.stages if world.label in stage.devices]
            labels = stages[0].devices if stages else (world.label,)
            on_each(world.all_gather_object, partial(refuse_faults, faults(held) if len(labels) > 1 else []))
            if len(labels) > 1:
                homes, made = cache.homes(tensors_of(self.model)), self.build.program
                part = Part(self.model, {id(x) for x in held.values()} & homes.keys())
                whole = [path for name in kept_whole(made) for path in paths_in(self.model, name)]
                shards = ReplicaShards(part, world, [world.labels.index(label) for label in labels])
                shards.shard(self.model, {*whole, *stays_whole(made)})
                ranks.parallel = shards
                for live in cache.lives.values():
                    shards.check(ranked(live), {})
                    ranked(live).parallel = shards
            shared = [] if ranks.parallel is None else sorted(ranks.parallel.shared)
            ranks.sharded = frozenset(path for some in world.all_gather_object(shared) for path in some)
            ranks.sharding_pending = False
            for key, build in cache.builds.items():  # of calls that were refused until now
                cache.builds[key] = replace(build, program=with_shards(build.program, ranks.sharded))
            cache.last = replace(self.build, program=with_shards(self.build.program, ranks.sharded))

    def parallelize(self, mesh: Any, function: Function) -> nn.Module:
        """Train several pipes side by side, each a row of a mesh, by torch's own data and tensor parallelism:
        `function(part, mesh)` is called once with this rank's part of the model, a module with the model's own
        submodules and names. Returns the function's result.

            mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "pp"))
            pipe = fxpipe.compile(model, chunks=8, group=mesh["pp"], example_inputs=batch)
            pipe.parallelize(mesh["dp"], lambda part, dp: DistributedDataParallel(part, device_mesh=dp))

        The function may also return `fully_shard(part, mesh=dp)`, or `parallelize_module(part, tp, plan)` with a mesh
        of tensor parallelism; with both, call `parallelize` first for tensor parallelism, then for the data.

        With data parallelism, each row has its own batch, all of the same size. Once a step, gradients are averaged in
        each data-parallel group, the ranks with the same place in all pipes: if the loss is a mean, they are those of
        the mean over all batches. With tensor parallelism, all rows have the same batch. Of torch's `plan` only the
        placements of parameters count: how other values are sharded follows from them, and between stages values are
        whole.

        With FSDP2 and tensor parallelism, parameters become DTensors, and the model's own lose their memory: make the
        optimizer from `pipe.parameters()` afterwards. All ranks call this, after `example_inputs` or `prepare`. If
        anything fails in a row, no gradient is added in any row. If a rank is lost while others wait for it in a
        collective of the mesh, the timeout of the mesh's process groups holds, not that of the pipe.

        Raises FxpipeError before there is a plan, if the function returns none of the three, and if stages cannot
        compute with parts of tensors; RankError if the rows do not have the same parts.
        """
        cache, ranks = self._state.cache, self._state.processes
        if self._shards:
            raise FxpipeError("the plan shards parameters over replicas: leave out parallelize, or ZeRO-3 in the plan")
        with ranks.together():
            self.keys_here()  # raises if the stages are not decided
            tensors = tensors_of(self.model)
            made = ranks.parallel
            if made is None:
                homes = cache.homes(tensors)
                own = {id(tensor) for tensor in self.held_tensors().values()} & homes.keys()
                groups = replica_groups(cache, tensors) or {}
                replicated = any(len(group) > 1 for group in groups.values())
                made = Parallel(Part(self.model, own), self.world, replicated, self.options.place is not None)
            found = made.apply(mesh, function)
            now = made.tensors()
            release({path: tensors[path] for path in now}, now.values(), lambda path: "a DTensor in pipe.parameters()")
            ranks.parallel = made
            if made.splits and cache.options.backward == AUTO:
                cache.options = replace(cache.options, backward="autograd")
            for live in cache.lives.values():
                scheduler = ranked(live)
                made.check(scheduler, {})
                scheduler.parallel = made
            return found


def shards_parameters(options: Options) -> bool:
    """Whether these options are those of a plan that shards parameters over replicas."""
    plan = options.plan
    return plan is not None and plan.optimizer_sharding == "zero3" and any(stage.replicas for stage in plan.stages)


def refuse_faults(found: Sequence[str]) -> None:
    if found:
        raise FxpipeError(f"parameters cannot be sharded over replicas (ZeRO-3): {'; '.join(found)}")


def replica_groups(cache: BuildCache, tensors: Mapping[str, Tensor]) -> Mapping[int, Sequence[str]] | None:
    """The devices of the stage that uses each tensor, by the tensor's `id`; None before the first call, which decides
    the stages."""
    if cache.home is None:
        return None
    stages = cache.home.plan.stages
    return {tensor: stages[stage].devices for tensor, stage in cache.homes(tensors).items()}
