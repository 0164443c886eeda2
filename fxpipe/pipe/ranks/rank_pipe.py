"""The pipe in a world of torch.distributed: each rank has the stages of its own device, and all make the same calls.

    rank 0, the leader                        every other rank
    step(x, target=y)                         step(x, target=y), or what of it is used there, or step()
      │ capture: which kind of call?            │ capture, with meta tensors for what was left out
      ├─ header: number of the kind, seed ─────▶│
      │  a new one? all capture, compare graphs, and follow the leader's plan
      ▼                                         ▼
    its part of the step, the consensus       its part of the step, the consensus

How ranks make a call together is in `rank_calls`, and which kind of call it is in `rank_builds`. A pipe may be a row of
a mesh, beside others like it:

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "pp"))
    pipe = fxpipe.compile(model, chunks=8, group=mesh["pp"], example_inputs=batch)
    pipe.parallelize(mesh["dp"], lambda part, dp: fully_shard(part, mesh=dp))
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from fxpipe.codegen.package.load_package import tensors_of
from fxpipe.engines.ranks.rank_group import World
from fxpipe.errors import FxpipeError
from fxpipe.pipe.build.build_cache import BuildCache
from fxpipe.pipe.options.compile_options import Options
from fxpipe.pipe.pipe import Pipe, PipeState

from .parallelize import Function, Parallel, release
from .rank_builds import RankBuilds
from .rank_tensors import RankTensors
from .ranks import Ranks, ranked, refuse_copy, refuse_pickle, weakly
from .stage_module import Part


@dataclass(kw_only=True)
class RankPipeState(PipeState):
    """What a `RankPipe` has beside the model."""

    processes: Ranks
    tensors: RankTensors


class RankPipe(Pipe):
    """What `fxpipe.compile` returns inside a torch.distributed world; see there, and `Pipe`.

    Every rank makes every call. The leader, rank 0, passes all arguments; any other rank passes what its stages use,
    and may leave out the rest, or pass None for it: `pipe.step(target=y, loss_fn=loss_fn)` on the last one. `loss_fn`
    and `outputs` are the same on all; `scaler`, `accumulate` and `timeline` are the leader's.

    Every rank gets the loss of the batch, and with `outputs` what the model returns; `pipe.timeline` is that of all
    ranks, by the leader's clock. Gradients are added to those of this rank's parameters, and an input that needs one
    gets it on every rank that passes it. A call of the pipe computes no gradients; where rows of a mesh have parts of
    the parameters, all rows make it together.

    If anything fails on any rank, no gradient is added on any: what failed here is raised, and RankError for what
    failed elsewhere, or if a rank is lost.
    """

    _state: RankPipeState
    __deepcopy__, __reduce__ = refuse_copy, refuse_pickle

    def __init__(self, model: nn.Module, options: Options, world: World) -> None:
        ranks = Ranks(world)
        kinds = RankBuilds(model, options, ranks)
        ranks.refuse = weakly(kinds.refuse)
        tensors = RankTensors(model, ranks, partial(replica_groups, kinds.cache))
        super().__init__(
            model, options, RankPipeState(cache=kinds.cache, kinds=kinds, processes=ranks, tensors=tensors)
        )

    @property
    def world(self) -> World:
        """The ranks of this pipe."""
        return self._state.processes.world

    @property
    def place(self) -> int:
        """The number of this rank among all that train the model: what it passes to `collect_all` comes there."""
        return self._state.processes.place

    def keys_here(self) -> Collection[str]:
        """The keys of `held_tensors`. Raises FxpipeError before the first call, which decides."""
        if self._state.cache.home is None:
            raise FxpipeError("it is not decided yet which rank has which stage: pass example_inputs to fxpipe.compile")
        return self.held_tensors().keys()

    def drop_others(self) -> None:
        """Free the memory of the parameters and buffers that belong to other ranks. They keep their shapes, for
        captures to come; nobody may look at their values. Raises FxpipeError before the first call."""
        self.keys_here()  # decided?
        self._state.tensors.drop_others()

    def parallelize(self, mesh: Any, function: Function) -> nn.Module:
        """Train this pipe beside others like it, by torch's own data and tensor parallelism: `function(part, mesh)` is
        called once with this rank's part of the model, a module with the model's own submodules and names; what it
        makes of it is returned.

            pipe.parallelize(mesh["dp"], lambda part, dp: DistributedDataParallel(part, device_mesh=dp))
            pipe.parallelize(mesh["dp"], lambda part, dp: fully_shard(part, mesh=dp))            # or this
            pipe.parallelize(mesh["tp"], lambda part, tp: parallelize_module(part, tp, plan))    # or this; or it first

        Over data, each row of the mesh has a batch of its own, as large as those of the others. Gradients are averaged
        over the rows, once a step: where the loss is a mean, they are those of its mean over the whole batch. With
        tensor parallelism all rows have the same batch. What counts of a plan are the placements of parameters: values
        in between are cut as follows from these, and whole between stages.

        With FSDP2 and tensor parallelism, parameters are DTensors afterwards, and the model's own have no memory any
        more: make the optimizer of `pipe.parameters()` then. All ranks call it, after `example_inputs` or `prepare`.
        If anything fails in a row, no gradient is added in any. Collectives that have begun wait for a lost rank for as
        long as the mesh's process groups do.

        Raises FxpipeError before there is a plan, if the function returns something else, and where stages cannot
        compute with parts of tensors; RankError if the rows have not the same parts.
        """
        cache, ranks = self._state.cache, self._state.processes
        with ranks.together():
            self.keys_here()  # decided?
            tensors = tensors_of(self.model)
            made = ranks.parallel
            if made is None:
                homes = cache.homes(tensors)
                own = {id(tensor) for tensor in self.held_tensors().values()} & homes.keys()
                made = Parallel(Part(self.model, own), self.world)
            found = made.apply(mesh, function)
            now = made.tensors()
            release([tensors[path] for path in now if tensors[path] is not now[path]], now.values())
            ranks.parallel = made
            for live in cache.lives.values():
                scheduler = ranked(live)
                made.check(scheduler, {})
                scheduler.parallel = made
            return found


def replica_groups(cache: BuildCache, tensors: Mapping[str, Tensor]) -> Mapping[int, Sequence[str]] | None:
    """The devices of the stages that use these tensors, by the ids of these; None before the first call, which
    decides."""
    if cache.home is None:
        return None
    stages = cache.home.plan.stages
    return {tensor: stages[stage].devices for tensor, stage in cache.homes(tensors).items()}
