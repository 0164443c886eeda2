"""Run one rank's part of a pipe: all processes have the same generated scheduler, and each runs its own device's row.

    rank 0  run 0F0  send x[0]  run 0F1  send x[1]  receive dx[0] ...       every rank runs its program, which
    rank 1  receive x[0]  run 1F0  receive x[1]  run 1B0  send dx[0] ...    `add_transfers` has made and checked

Receives are posted asynchronously; an action waits when it needs the value. A send by gloo waits if too many to the
same rank are unfinished (`rank_transport.AHEAD`), other sends never. The shape and type of each message are known, so
there are few other messages: the leader's header before a step, and after it the verdict, in which each rank tells all
others how its step went.

A rank that fails goes on to the end of its program without computing: its messages say that it has failed, and a rank
that needs one of them fails in turn. So no rank hangs, no message is left over, and the verdict tells all ranks the
cause. If a rank is lost, the ranks that need its messages fail in the same way, and no further step is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.engines.common.gradient_scale import Scale
from fxpipe.engines.common.replica_routing import sliced
from fxpipe.engines.common.scheduler_base import MiniBatch
from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.errors import FxpipeError, InputError, RankError
from fxpipe.ir.program.messages import MessageTable
from fxpipe.ir.timeline import Timeline
from fxpipe.runtime import Stage
from fxpipe.runtime.autograd.gradient_aliases import Pair, commit_gradients
from fxpipe.runtime.caller_context import current_context
from fxpipe.runtime.deferred_norms import commit

from .failure_attribution import Lost
from .input_checksums import Unread
from .rank_group import World
from .rank_program import RankProgram
from .rank_run import RankObserver, RankPlan, take
from .rank_timer import RankTimer
from .replicas.replica_reduce import broadcast_values, commit_statistics, written
from .replicas.shard_exchange import ShardExchange
from .weight_exchange import WholeLoans, WrittenLoans


class RankScheduler:
    """Runs one rank's part of a generated scheduler.

    - `steps`: the scheduler; its stages on other ranks are empty.
    - `program`: the rank's program of a step; `table`: the messages of all ranks.
    - `parallel`: how the rows of a mesh add up gradients, or None; `shards`: how replicas exchange the parameters of
      which each has a part, or None. The pipe sets both when its parameters are shared out.
    - `written`: the tensors that are written on another rank than their home.
    """

    def __init__(self, steps: StepScheduler, world: World, table: MessageTable) -> None:
        self.steps, self.world, self.table = steps, world, table
        self.written = WrittenLoans(world, ())
        self.parallel: Any = None
        self.shards: ShardExchange | None = None
        self.stages, self.all_stages = steps.stages, steps.all_stages
        self.random, self.close = steps.random, steps.close
        self.program = RankProgram(world, table, steps.cuts)
        self.replicated = len(self.program.replica_group) > 1
        labels = [world.label if self.program.here(j) else label for j, label in enumerate(steps.devices)]
        self.place = replace(steps.place, devices=tuple(labels))
        gives, takes = steps.totals
        self._used = {name for name, j in steps.feeds if self.program.here(j)}
        self._used |= set() if self._used.isdisjoint(gives) else set(takes)
        self._used |= {
            name for (name, _, _), maker in zip(steps.outputs, table.makers, strict=True) if maker < 0 and world.leads
        }

    @property
    def source(self) -> str:
        """The text of the generated file."""
        return self.steps.source

    def run(
        self,
        batch: Sequence[Any],
        chunks: int,
        scale: Scale | None = None,
        seed: int = 0,
        error: BaseException | None = None,
        observer: RankObserver | None = None,
        given: Callable[[], Unread] = dict,
        commit_pairs: Callable[[list[Pair]], None] = commit_gradients,
    ) -> tuple[Any, ...]:
        """Run a step: the outputs of the whole batch, on every rank. A rank must have the inputs that its stages use,
        and gets the gradients of its own stages and of the inputs that it has. `seed`: of the random ops. With an
        `error`, this rank only takes part in the messages, and raises it. `given` computes the checksums of this
        rank's arguments, which must not differ from those of others. `commit_pairs` adds the gradients to the model's.
        Raises RankError if checksums differ, or if a rank is lost."""
        seen = [self._seen(name, value) for (name, _), value in zip(self.steps.inputs, batch, strict=True)]
        with self.world.interrupts.patiently() as interrupts, self._held(error) as error:
            try:
                self._even_out()  # other calls may have changed the buffers
                self.written.fetch()
                plan = self._plan(seen, chunks, seed, scale, error or self._check(batch), given)
                run = take(plan, observer, interrupts)
                self._commit()
                outputs, pairs = run.outputs(), run.pairs(batch)
                if observer is not None:
                    observer.report()
            except Lost as lost:
                raise RankError(str(lost)) from None
            if self.parallel is None or not run.m.grad:
                commit_pairs(pairs)
            else:
                self.parallel.add(pairs)
            self._give_back()
        return outputs

    def _held(self, error: BaseException | None) -> AbstractContextManager[BaseException | None]:
        """Begin a step: a context in which the stages hold their tensors. Gives the error so far."""
        self.world.begin()
        return nullcontext(error) if self.parallel is None else self.parallel.held(self, error)

    def _give_back(self) -> None:
        """Bring what was written for other ranks home. Raises RankError if a rank is lost."""
        try:
            self.written.give_back()
        except Lost as lost:
            raise RankError(str(lost)) from None

    def _plan(
        self,
        batch: Sequence[Any],
        chunks: int,
        seed: int,
        scale: Scale | None,
        error: BaseException | None,
        given: Callable[[], Unread],
    ) -> RankPlan:
        """What is decided before a step, with this rank's slices of the batch."""
        self.steps.refresh()
        slices = whole = self.steps.scatter(batch, chunks, seed)
        if self.replicated:
            slices = sliced(self.steps, whole, len(self.program.replica_group))[self.program.replica]
        if self.shards is not None:
            error = error or self._unshardable(whole)
        lent = WholeLoans({}) if self.parallel is None else self.parallel.lent
        return RankPlan(self.steps, self.place, self.program, whole, slices, scale, error, given, self.shards, lent)

    def join(self) -> None:
        """Make the process groups of collectives, but not for ranks that share memory, which send each other their
        parts instead. Copy the states of the first replica of each stage to the others. All ranks make this call.
        Raises Lost."""
        if groups := self.program.groups:
            hosted = self.world.communicators is None
            near = [{*ranks} for ranks in self.world.all_gather_object([self.world.rank, *self.world.local_peers])]
            self.world.make_groups([g for g in groups if not (hosted and all({*g} <= near[rank] for rank in g))])
        if self.replicated:
            shared = () if self.parallel is None else self.parallel.tensors()  # in place of the model's own
            own = [stage.tensor(path) for stage in self.stages for path in stage.states if path not in shared]
            broadcast_values(self.world, self.program.replica_group, own)

    def _even_out(self) -> None:
        """Copy the buffers that forward writes from the first replica to the others. Raises Lost."""
        if self.replicated and self.steps.mutating:
            broadcast_values(self.world, self.program.replica_group, written(self.steps.mutating))

    def _commit(self) -> None:
        """Update running statistics at the end of the mini-batch. Raises Lost."""
        if self.replicated and self.steps.mutating:
            commit_statistics(self.world, self.program.replica_group, self.steps.mutating)
        else:
            commit(self.steps.mutating)

    def _check(self, batch: Sequence[Any]) -> InputError | None:
        """An error if an input that this rank uses is missing here, else None."""
        missing = [n for (n, _), x in zip(self.steps.inputs, batch, strict=True) if n in self._used and is_meta(x)]
        if not missing:
            return None
        return InputError(
            f"{', '.join(missing)}: not given on rank {self.world.rank}, whose stages use it; pass it there, too"
        )

    def _unshardable(self, whole: MiniBatch) -> FxpipeError | None:
        """An error if replicas could not gather their parameters together in this step, else None."""
        count, least = len(self.program.replica_group), min(whole.sizes)
        if least < count:
            return InputError(
                f"a micro-batch has {least} samples for {count} replicas that share out their parameters (ZeRO-3), so "
                "not all of them would take part: give larger batches, or fewer chunks"
            )
        if current_context().autocasts:
            return FxpipeError(
                "autograd keeps the casts that torch.autocast makes of gathered parameters, whole, until backward: "
                "leave out autocast with optimizer_sharding='zero3', and convert the model instead"
            )
        return None

    def _seen(self, name: str, value: Any) -> Any:
        """An input as this rank needs it: a meta tensor if none of its stages uses it."""
        if not isinstance(value, Tensor):
            return value
        if name not in self._used:
            return torch.empty_like(value, device="meta", requires_grad=value.requires_grad)
        return value


def on_rank(
    kind: type[StepScheduler],
    stages: Sequence[Stage | None],
    whole: tuple[Stage | None, Stage | None],
    world: World,
    table: MessageTable,
) -> RankScheduler:
    """The RankScheduler of this rank, for the generated class `kind`. `stages` has the stages, then their further
    replicas; None for those that run on other ranks. `whole`: what computes the totals and the epilogue of the whole
    batch, this only where the stage runs that it takes from."""
    count = len(kind.devices)
    further, groups = iter(stages[count:]), []
    for j, labels in enumerate(table.replica_groups):
        group = (stages[j], *(next(further) for _ in labels[1:]))
        groups.append(next((stage for stage in group if stage is not None), None) or elsewhere(j, world, table))
    others = [Stage({}, {}, world.device) for _ in stages[count:]]
    return RankScheduler(kind([*groups, *others], *whole, threads=False), world, table)


def elsewhere(j: int, world: World, table: MessageTable) -> Stage:
    """An empty stage in the place of stage j of another rank; the tensors that it lends are on the meta device."""
    found = Stage({}, {}, world.device)
    for loan in table.lent:
        if loan.home == j:
            (setattr if loan.constant else Stage.put)(found, loan.path, torch.empty(0, device="meta"))
    return found


def take_step(
    scheduler: RankScheduler,
    batch: Sequence[Any],
    chunks: int,
    scale: Scale | None,
    seed: int,
    timeline: bool,
    given: Callable[[], Unread],
) -> tuple[tuple[Any, ...], Timeline | None]:
    """Run a step: the outputs, and the timeline of all ranks if `timeline` is set, else None. `timeline` must be the
    same on all ranks. `given`: computes the checksums of this rank's arguments."""
    if not timeline:
        return scheduler.run(batch, chunks, scale, seed, given=given), None
    timer = RankTimer(scheduler.world)
    outputs = scheduler.run(batch, chunks, scale, seed, observer=timer, given=given)
    return outputs, timer.timeline(scheduler.steps.schedule, scheduler.table.replica_groups)


def is_meta(value: Any) -> bool:
    """Whether the value is a meta tensor, which stands for a tensor on other ranks."""
    return isinstance(value, Tensor) and value.is_meta
