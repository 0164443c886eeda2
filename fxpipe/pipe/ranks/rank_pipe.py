"""The pipe in a world of torch.distributed: each rank has the stages of its own device, and all make the same calls.

    rank 0, the leader                        every other rank
    step(x, target=y)                         step(x, target=y), or what of it is used there, or step()
      │ front: which kind of call?              │ front, with stand-ins for what was left out
      ├─ header: number of the kind, seed ─────▶│
      │  a new one? all capture, compare graphs, and follow the leader's plan
      ▼                                         ▼
    its part of the step, the verdict         its part of the step, the verdict

How ranks make a call together is in `rank_calls`, and which kind of call it is in `rank_builds`. A pipe may be a row of
a mesh, beside others like it:

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "pp"))
    pipe = fxpipe.compile(model, chunks=8, group=mesh["pp"], example_inputs=batch)
    pipe.parallelize(mesh["dp"], lambda part, dp: fully_shard(part, mesh=dp))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fxpipe.capture import NO_TARGET
from fxpipe.codegen.package.load_package import tensors_of
from fxpipe.engines.ranks.rank_group import World
from fxpipe.errors import FxpipeError
from fxpipe.ir.graph.graph import Graph
from fxpipe.pipe.build.build_cache import BuildCache
from fxpipe.pipe.build.call_binding import inputs_of
from fxpipe.pipe.build.compare_timelines import Timed
from fxpipe.pipe.drop_in_module import check_grad
from fxpipe.pipe.options.compile_options import Options
from fxpipe.pipe.options.option_table import check_step
from fxpipe.pipe.pipe import Pipe, PipeState

from .parallelize import Function, Parallel, release
from .rank_arguments import Given
from .rank_builds import RankBuilds
from .rank_calls import NEW, Header
from .rank_consistency import on_each
from .rank_tensors import RankTensors
from .ranks import Ranks, forward, ranked, refuse_copy, refuse_pickle
from .stage_module import Part


@dataclass(kw_only=True)
class RankPipeState(PipeState):
    """What a `RankPipe` has beside the model. `kinds`: the kinds of calls that all ranks know."""

    processes: Ranks
    tensors: RankTensors
    kinds: RankBuilds


class RankPipe(Pipe):
    """What `fxpipe.compile` returns inside a torch.distributed world; see there, and `Pipe`."""

    _state: RankPipeState
    forward, __deepcopy__, __reduce__ = forward, refuse_copy, refuse_pickle

    def __init__(self, model: nn.Module, options: Options, world: World) -> None:
        ranks = Ranks(world)
        kinds = RankBuilds(ranks)
        cache = BuildCache(model, options, kinds.make, kinds.bind, lambda: ranks.leads)
        tensors = RankTensors(model, ranks, partial(replica_groups, cache))
        state = RankPipeState(cache=cache, kinds=kinds, processes=ranks, tensors=tensors, lock=ranks.lock)
        super().__init__(model, options, state)

    @property
    def world(self) -> World:
        """The ranks of this pipe."""
        return self._state.processes.world

    # Running ----------------------------------------------------------------------------------------------------------

    @property
    def place(self) -> int:
        """The number of this rank among all that train the model: what it passes to `collect_all` comes there."""
        return self._state.processes.place

    def forward_only(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the whole batch, without gradients, on every rank; a call of all rows of a mesh
        together where they have parts of the parameters."""

        def call(given: Given) -> Any:
            with torch.no_grad():
                return self._state.cache.call_capture(given[0], given[1], self._run)

        return self._state.processes.call(call, (args, kwargs, NO_TARGET), self._refuse, trains=False)

    def step(
        self,
        *args: Any,
        target: Any = NO_TARGET,
        loss_fn: Callable[..., Any] | None = None,
        outputs: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        timeline: bool = False,
        **kwargs: Any,
    ) -> Any:
        """The loss of the batch, on every rank; gradients are added to those of this rank's parameters.

        Every rank makes this call. The leader, rank 0, passes all arguments; any other rank passes what its stages use,
        and may leave out the rest, or pass None for it: `pipe.step(target=y, loss_fn=loss_fn)` on the last one.
        `loss_fn` and `outputs` are the same on all. With `outputs`, every rank gets what the model returns. The scale
        is that of the leader's `scaler`, and `accumulate` the leader's. With the leader's `timeline`, `pipe.timeline`
        is that of all ranks, on every rank, by the leader's clock. An input that needs a gradient gets it on every rank
        that passes it.

        If anything fails on any rank, no gradient is added on any. Raises what failed here, and RankError for what
        failed elsewhere or if a rank is lost.
        """

        ranks, step_capture = self._state.processes, self._state.cache.step_capture

        def call(given: Given) -> Any:
            check_grad()
            check_step(outputs=outputs, timeline=timeline)
            ranks.set_scale(scaler, accumulate)
            return step_capture.step(*given, loss_fn, outputs, self._run)

        header = Header(timeline=timeline)
        loss, output = ranks.call(call, (args, kwargs, target), self._refuse, header, trains=True)
        return (loss, output) if outputs else loss

    def rehearse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Only for pipes in one process."""
        raise FxpipeError("rehearse is for pipes in one process")

    def verify(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Only for pipes in one process."""
        raise FxpipeError(
            'verify is for pipes in one process: compile the same plan with a list of devices, as in ["cpu", "cpu"]'
        )

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Capture, plan and generate for this kind of call, on all ranks, without running it."""
        cache, kinds, calls = self._state.cache, self._state.kinds, self._state.processes.calls

        def call(given: Given) -> None:
            graph = cache.call_capture.capture(given[0], given[1])
            made, number = kinds.agree(cache, graph, inputs_of(graph, given[0], given[1]))
            if not any(tensor.is_meta for tensor in self.held_tensors().values()):
                cache.live(made)
            if self.world.leads and not calls.joined:
                calls.tell(number)

        def refuse(header: Header, signatures: Given, error: BaseException) -> None:
            if header.kind == NEW:  # the others run nothing else
                self._refuse(header, signatures, error)

        self._state.processes.call(call, (args, kwargs, NO_TARGET), refuse)

    def _refuse(self, header: Header, signatures: Given, error: BaseException) -> None:
        self._state.kinds.refuse(self._state.cache, header, signatures, error)

    def _run(self, graph: Graph, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """This rank's part of a call of this kind."""
        found, timeline = self._state.kinds.take(self._state.cache, graph, inputs)
        if timeline is not None:
            self._state.timed = Timed(self.build, timeline)
        return found

    # The model --------------------------------------------------------------------------------------------------------

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

    # Keeping ----------------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """As in one process. All ranks call it, and the leader writes."""
        with self._state.processes.together():
            on_each(self.world.collect, lambda: super(RankPipe, self).save(folder, overwrite) if self.leads else None)


def replica_groups(cache: BuildCache, tensors: Mapping[str, Tensor]) -> Mapping[int, Sequence[str]] | None:
    """The devices of the stages that use these tensors, by the ids of these; None before the first call, which
    decides."""
    if cache.home is None:
        return None
    stages = cache.home.plan.stages
    return {tensor: stages[stage].devices for tensor, stage in cache.homes(tensors).items()}
