"""Run one rank's part of a pipe: the same generated scheduler, of which each process runs the row of its own device.

    rank 0  run 0F0  send x[0]  run 0F1  send x[1]  receive dx[0] ...       every rank goes through its program, which
    rank 1  receive x[0]  run 1F0  receive x[1]  run 1B0  send dx[0] ...    `add_transfers` has made and checked

To receive is to begin to: nobody waits until an action takes what was to come. To send never waits. All forms are
known, so beside the values little is said: the leader's header before a step, and after it how it went, by all to all.

A rank that fails goes on to the end of its program without computing: what it sends says that it has failed, and who
takes that fails in turn. So nothing hangs and nothing is left over, and the verdict tells everyone what happened where.
If a rank is lost, those who were to hear from it fail in the same way, and no step can be any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxpipe.engines.common.replica_routing import sliced
from fxpipe.engines.common.step import Scale, Step
from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.errors import InputError, RankError
from fxpipe.ir.program.messages import MessageTable
from fxpipe.ir.timeline import Timeline
from fxpipe.runtime import Stage
from fxpipe.runtime.deferred_norms import commit
from fxpipe.runtime.gradient_aliases import commit_gradients

from .rank_group import Lost, World
from .rank_program import RankProgram
from .rank_run import RankRun
from .rank_timer import RankTimer
from .replica_reduce import broadcast_values, commit_statistics, written


class RankScheduler:
    """What runs one rank's part of a generated scheduler, `steps`, whose stages of other ranks are empty.

    - `program`: what it does in each step; `table`: the messages of all ranks.
    - `parallel`: how the rows of a mesh add up gradients, or None.
    """

    parallel: Any = None

    def __init__(self, steps: StepScheduler, world: World, table: MessageTable) -> None:
        self.steps, self.world, self.table = steps, world, table
        self.stages, self.whole, self.random, self.close = steps.stages, steps.whole, steps.random, steps.close
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
        """The text of the file that the scheduler came from."""
        return self.steps.source

    def run(
        self,
        batch: Sequence[Any],
        chunks: int,
        scale: Scale = None,
        seed: int = 0,
        error: BaseException | None = None,
        timer: RankTimer | None = None,
    ) -> tuple[Any, ...]:
        """The outputs, on every rank, for the inputs, of which those must be here that stages of this rank use; each
        rank gets the gradients of its own stages, and those of the inputs that it has. `seed` is what random numbers
        begin with. With an `error`, this rank only takes part, and fails by it."""
        self.world.begin()
        seen = [self._seen(name, value) for (name, _), value in zip(self.steps.inputs, batch, strict=True)]
        with nullcontext(error) if self.parallel is None else self.parallel.held(self, error) as error:
            try:
                self._even_out()  # what other calls have made of the buffers
                run = self._begin(seen, chunks, seed, error or self._check(batch))
                run.take(scale, timer)
                self._commit()
                outputs, pairs = run.outputs(), run.pairs(batch)
                if timer is not None:
                    timer.report()
            except Lost as lost:
                raise RankError(str(lost)) from None
            if self.parallel is None or not run.m.grad:
                commit_gradients(pairs)
            else:
                self.parallel.add(pairs)
        return outputs

    def _begin(self, batch: Sequence[Any], chunks: int, seed: int, error: BaseException | None) -> RankRun:
        """A step that is ready to run."""
        self.steps.refresh()
        m = whole = self.steps.scatter(batch, chunks, lambda sizes, *_: Step(sizes, self.place, False))
        whole.seed = seed
        if self.replicated:
            sizes, slices = sliced(self.steps, whole, len(self.program.replica_group))[self.program.replica]
            m = Step(sizes, self.place, False)
            m[:] = slices
        m.slice_of(whole, self.program.replica, self.program.routes)
        return RankRun(self.steps, self.program, m, whole, error)

    def share_values(self) -> None:
        """Let all replicas of a stage begin with the values that the first one has. Raises Lost."""
        if self.replicated:
            own = [stage.tensor(path) for stage in self.stages for path in stage.states]
            broadcast_values(self.world, self.program.replica_group, own)

    def _even_out(self) -> None:
        """The buffers that forward writes are those of the first replica. Raises Lost."""
        if self.replicated and self.steps.mutating:
            broadcast_values(self.world, self.program.replica_group, written(self.steps.mutating))

    def _commit(self) -> None:
        """The mini-batch is over. Raises Lost."""
        if self.replicated and self.steps.mutating:
            commit_statistics(self.world, self.program.replica_group, self.steps.mutating)
        else:
            commit(self.steps.mutating)

    def _check(self, batch: Sequence[Any]) -> InputError | None:
        """What is wrong with the inputs, as far as they are used here."""
        missing = [n for (n, _), x in zip(self.steps.inputs, batch, strict=True) if n in self._used and is_meta(x)]
        if not missing:
            return None
        return InputError(
            f"{', '.join(missing)}: not given on rank {self.world.rank}, whose stages use it; pass it there, too"
        )

    def _seen(self, name: str, value: Any) -> Any:
        """An input as this rank needs it: only its shape, where none of its stages takes it."""
        if not isinstance(value, Tensor):
            return value
        if name not in self._used:
            return torch.empty_like(value, device="meta", requires_grad=value.requires_grad)
        return value


def on_rank(
    kind: type[StepScheduler], stages: Sequence[Stage | None], whole: Stage | None, world: World, table: MessageTable
) -> RankScheduler:
    """What runs one rank's part of a generated scheduler. `stages`, followed by their further replicas, are None where
    another rank runs them."""
    count = len(kind.devices)
    further, groups = iter(stages[count:]), []
    for j, labels in enumerate(table.replica_groups):
        group = (stages[j], *(next(further) for _ in labels[1:]))
        groups.append(next((stage for stage in group if stage is not None), None) or elsewhere(j, world, table))
    others = [Stage({}, {}, world.device) for _ in stages[count:]]
    return RankScheduler(kind([*groups, *others], whole, threads=False), world, table)


def elsewhere(j: int, world: World, table: MessageTable) -> Stage:
    """In the place of stage j of another rank: what it lends has no values there."""
    found = Stage({}, {}, world.device)
    for loan in table.lent:
        if loan.home == j:
            (setattr if loan.constant else Stage.put)(found, loan.path, torch.empty(0, device="meta"))
    return found


def take_step(
    scheduler: RankScheduler, batch: Sequence[Any], chunks: int, scale: Scale, seed: int, timeline: bool
) -> tuple[tuple[Any, ...], Timeline | None]:
    """The outputs of a step, and when what ran on which rank, if that is asked for; all ranks ask, or none."""
    if not timeline:
        return scheduler.run(batch, chunks, scale, seed), None
    timer = RankTimer(scheduler.world)
    outputs = scheduler.run(batch, chunks, scale, seed, timer=timer)
    return outputs, timer.timeline(scheduler.steps.schedule, scheduler.table.replica_groups)


def is_meta(value: Any) -> bool:
    """Whether it stands for a tensor that other ranks have, and only has its shape."""
    return isinstance(value, Tensor) and value.is_meta
