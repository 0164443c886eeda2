"""The kinds of calls of a pipe over ranks, with the same number on every rank, and the builds of this rank.

`rank_calls` has how ranks make a call together. This module finds the kind of a call and makes its build: all ranks
capture, compare their graphs, and follow the leader's plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.capture import NO_TARGET
from fxpipe.codegen.package.load_package import bound_stages, tensors_of
from fxpipe.codegen.package.package_files import constants
from fxpipe.codegen.scheduler.message_table import message_table
from fxpipe.engines.ranks.rank_engine import RankScheduler, on_rank
from fxpipe.engines.ranks.rank_group import COMPILING, World
from fxpipe.engines.ranks.rendezvous import LEADER
from fxpipe.engines.ranks.step_consensus import describe
from fxpipe.engines.ranks.weight_exchange import WrittenLoan, WrittenLoans
from fxpipe.errors import FxpipeError, RankError, ReleasedError
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.opaque_call import opaques
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.program.program import Program
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.pipe.build import sharded_build
from fxpipe.pipe.build.build import Build, build
from fxpipe.pipe.build.build_cache import BuildCache, build_here
from fxpipe.pipe.build.call_binding import bound, micro_batch_sizes, with_states
from fxpipe.pipe.options.compile_options import Options
from fxpipe.pipe.running_package import RunningPackage
from fxpipe.runtime import Stage

from .rank_arguments import CallArguments
from .rank_calls import NEW, Header
from .rank_consistency import agree, described, digest, on_each
from .ranks import Ranks, ranked, weakly
from .released_tensors import Released
from .replica_shards import with_shards


@dataclass(frozen=True)
class Decided:
    """The leader's decisions for a kind of call, which all ranks follow."""

    plan: Plan
    schedule: Schedule
    profile: Profile
    cluster: Cluster
    layouts: Mapping[str, str]


class RankBuilds:
    """The kinds of calls that all ranks have agreed on, in the order of their first calls.

    - `cache`: the builds of this rank.
    - `keys`: for each kind, its first key in `cache`.
    - `texts`: for each kind, its graph as text.
    - `known`: the number of each kind, by all of this rank's keys for it.
    """

    def __init__(self, model: nn.Module, options: Options, ranks: Ranks) -> None:
        self.ranks, self.world, self.calls = ranks, ranks.world, ranks.calls
        self.cache = BuildCache(model, options, weakly(self.make), weakly(self.bind), lambda: ranks.leads)
        self.known: dict[tuple[Any, ...], int] = {}
        self.keys: list[tuple[Any, ...]] = []
        self.texts: list[str] = []

    # One call ---------------------------------------------------------------------------------------------------------

    def live(self, made: Build) -> RunningPackage:
        """The running package of a build on this rank. For a new build, waits until all ranks have loaded theirs, and
        gives replicas the same values."""

        if self.ranks.sharding_pending:
            raise FxpipeError(
                "optimizer_sharding='zero3' shards parameters before the first step: pass example_inputs to "
                "fxpipe.compile, or call pipe.prepare(...); on the meta device, also pipe.materialize()"
            )

        def load() -> None:
            self.cache.live(made)

        new = self.calls.joined
        if new:
            on_each(self.world.all_gather_object, load)
        live = self.cache.live(made)
        if new:
            ranked(live).join()
            self.ranks.release_others()
        return live

    def join_failed_call(self, header: Header, signatures: CallArguments, error: BaseException) -> None:
        """Take part in a call that has failed on this rank, so that all ranks learn of the error."""
        if header.kind == NEW:
            agree(self.world, None, error)
        if header.kind == NEW or not header.runs:
            return
        made = self.cache.builds[self.keys[header.kind]]
        args, kwargs, target = signatures
        named = kwargs if target is NO_TARGET else {**kwargs, "target": target, "loss_target": target}
        found = bound(made.graph, args, named)
        inputs = [found.get(item.name, 0) for item in made.graph.inputs if item.path]
        ranked(self.cache.live(made)).run(inputs, self.cache.options.chunks, error=error)  # raises it

    def agree(self, graph: Graph, inputs: Sequence[Any]) -> tuple[Build, int]:
        """The build for a kind of call, and the kind's number, which is the same on all ranks. A new kind is built.
        Raises RankError if the kind is new on some ranks only."""
        key = self.cache.kind(graph, inputs)
        new = not self._knows(graph, key)
        if new:  # until the call has ended: stages may be compiled when they run first
            self.world.allowance = COMPILING
        if self.world.leads and new:
            self.calls.tell()
        elif not self.world.leads and new != (self.calls.heard().kind == NEW):
            raise RankError(
                f"this call is of a kind that is new on rank {self.world.rank if new else LEADER} alone: is the model "
                "in training on one rank and in evaluation on the other, or does the loss function differ?"
            )
        made = self.cache.built(graph, inputs)
        self.ranks.built |= new
        if new:  # and all have agreed on it
            self.known[key] = len(self.keys)
            self.texts.append(self._text(graph, key))
            self.keys.append(key)
        return made, self.known[key]

    def _text(self, graph: Graph, key: tuple[Any, ...]) -> str:
        """What is the same in all calls of a kind, on all ranks: the graph, the mode, and the sizes if a build is for
        these only."""
        return f"{replace(graph, training=self.cache.model.training)}\n{key[1:]}"

    def _knows(self, graph: Graph, key: tuple[Any, ...]) -> bool:
        """Whether there is a build for this kind of call. Ranks may recapture at different calls, so a new graph counts
        as known if its text is that of a known one."""
        builds = self.cache.builds
        if key in self.known:
            return True
        text = self._text(graph, key)
        graph = replace(graph, training=self.cache.model.training)
        if text not in self.texts:
            return False
        number = self.texts.index(text)
        builds[key] = replace(with_states(builds[self.keys[number]], graph), graph=graph)
        self.known[key] = number
        return True

    # What is made for it ----------------------------------------------------------------------------------------------

    def make(self, cache: BuildCache, graph: Graph, inputs: Sequence[Any]) -> Build:
        """The build of a graph: the leader plans, the other ranks follow. Raises RankError if ranks do not agree."""
        self.calls.joined = True
        agree(self.world, f"{described(cache.options)}\n{graph}")
        if self.world.leads:
            error, decided = None, None
            try:
                with self.world.interrupts.let_in():
                    made = build_here(cache, graph, inputs)
                decided = Decided(made.plan, made.schedule, made.profile, made.cluster, graph.layouts)
            except BaseException as failed:
                error = failed
            self.world.broadcast((decided, describe(error)))
            if error is not None:
                raise error
        else:
            decided, failed_there = self.world.broadcast()
            if decided is None:
                raise RankError(f"rank {LEADER}: {failed_there}")
            made = build_like(cache, graph, inputs, decided)
        agree(self.world, f"{made.program}\n{made.schedule}\n{digest(made.files)}")
        return replace(made, program=with_shards(made.program, self.ranks.sharded)) if self.ranks.sharded else made

    def bind(self, model: nn.Module, made: Build, others: Mapping[str, Tensor], package: ModuleType) -> RankScheduler:
        """The scheduler of the stages on this rank."""
        calls = {opaque.called: opaque for opaque in opaques(made.graph)}
        held, here = constants(made.program, made.whole), {self.world.label: self.world.device}
        loans = written_loans(self.world, made.program, tensors_of(model))
        copies = {loan.path: loan.here for loan in loans if loan.here is not None and self.world.rank in loan.users}
        stages, whole, last = bound_stages(package, model, held, {**others, **copies}, calls, here=here)
        if self.ranks.parallel is None:  # else stages get their tensors from that
            check_values([stage for stage in stages if stage is not None])
        table = message_table(made.program, made.schedule)
        scheduler = on_rank(package.Scheduler, stages, (whole, last), self.world, table)
        scheduler.written = WrittenLoans(self.world, loans)
        if self.ranks.parallel is not None:
            known = {id(tensor) for tensor in tensors_of(model).values()}
            strange = {path: tensor for path, tensor in others.items() if id(tensor) not in known}
            self.ranks.parallel.check(scheduler, strange)
            scheduler.parallel = self.ranks.parallel
        return scheduler


def check_values(stages: Sequence[Stage]) -> None:
    """Raise ReleasedError if a stage of this rank has a tensor whose values another rank has."""
    for stage in stages:
        for path in stage.states:
            if isinstance(found := stage.tensor(path), Released):
                raise ReleasedError(
                    f"{path} is needed by a stage of this rank, and is {found.holder}, where an earlier pipe of this "
                    "model has put it: call gather() of that pipe on all ranks before you compile the model again"
                )


def written_loans(world: World, program: Program, tensors: Mapping[str, Tensor]) -> list[WrittenLoan]:
    """The written loans of a program, with this rank's tensors and copies. `tensors`: those of the model, by path."""
    found = []
    for loan in program.written_loans:
        path = program.state(loan.state).path
        homes, users = (
            tuple(map(world.labels.index, program.stages[stage].devices)) for stage in (loan.home, loan.user)
        )
        here = tensors[path] if world.rank in homes else None
        if world.rank in users:
            theirs = tensors[path]
            here = torch.empty(theirs.shape, dtype=theirs.dtype, device=world.device)
        found.append(WrittenLoan(path, homes, users, here))
    return found


def build_like(cache: BuildCache, graph: Graph, inputs: Sequence[Any], decided: Decided) -> Build:
    """The build of a graph with the leader's decisions. A strategy decides the same on all ranks."""
    options, graph = cache.options, replace(graph, layouts=decided.layouts)
    sizes = micro_batch_sizes(graph, inputs, options.chunks)
    if options.place is not None:
        return sharded_build.build(graph, sizes, decided.cluster, options, cache.owners, cache.first)
    devices = tuple(stage.device for stage in decided.plan.stages)
    options = replace(options, plan=decided.plan, schedule=decided.schedule, devices=devices)
    return build(graph, decided.profile, sizes, decided.cluster, options, None, cache.owners)
