"""The ranks of a pipe, seen from one of them: their calls, collectives and checks."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar
from weakref import WeakMethod

import torch

from fxpipe.engines.common.gradient_scale import Scale
from fxpipe.engines.ranks.failure_attribution import Lost
from fxpipe.engines.ranks.rank_engine import RankScheduler
from fxpipe.engines.ranks.rank_group import World
from fxpipe.engines.rehearsal.action_profiler import Rehearsed
from fxpipe.errors import FxpipeError, RankError
from fxpipe.ir.timeline import Timeline
from fxpipe.pipe.processes import Processes, StepOptions
from fxpipe.pipe.running_package import RunningPackage

from .parallelize import Parallel
from .rank_arguments import CallArguments
from .rank_calls import Call, JoinFailedCall, RankCalls
from .rank_consistency import on_each
from .released_tensors import trim

R = TypeVar("R")


class Ranks(Processes):
    """The ranks of a pipe, which make its calls together.

    - `world`: the ranks.
    - `calls`: how they make calls together.
    - `parallel`: the parallelism with pipes side by side, or None.
    - `sharding_pending`: whether the plan shards parameters over replicas, and that is still to be done; `sharded`: the
      paths of the parameters that are sharded, of all ranks.
    - `number`: of the pipe, the same on all ranks.
    - `built`: whether the call under way is of a new kind.
    - `gathered`: whether the model here has values of other ranks, which the next call changes.
    - `join_failed_call`: takes part in a call that has failed on this rank, so that all ranks learn of the error.
    - `release_others`: lets go of the tensors that belong to other ranks.
    """

    def __init__(
        self, world: World, check_inputs: bool, join_failed_call: JoinFailedCall, release_others: Callable[[], None]
    ) -> None:
        super().__init__()
        self.join_failed_call, self.release_others = join_failed_call, release_others
        self.world, self.calls, self.checks_inputs = world, RankCalls(world, check_inputs), check_inputs
        self.parallel: Parallel | None = None
        self.sharding_pending, self.sharded = False, frozenset[str]()
        self.gathered = self.built = False
        self.number = world.open.made
        self._left = weakref.finalize(self, world.open.leave, self.number)

    def call(self, call: Call, given: CallArguments, name: str = "prepare") -> Any:
        if self.parallel is not None and name == "rehearse":
            raise FxpipeError("rehearse is for whole parameters, of a pipe by itself: call it before parallelize")
        beside = nullcontext() if self.parallel is None or name == "prepare" else self.parallel.call(name == "step")
        with self.lock, self.world.interrupts, beside, self.together():
            if self.gathered:
                self.release_others()
                self.gathered = False
            try:
                return self.calls.make(call, given, self.join_failed_call, name)
            finally:
                if self.built:
                    trim()
                    self.built = False

    def take(
        self, live: RunningPackage, inputs: Sequence[Any], chunks: int, step: StepOptions | None, kind: int = 0
    ) -> tuple[tuple[Any, ...], Timeline | None]:
        scale, timed = None, step is not None and step.timeline
        if step is not None and step.scaler is not None:
            times = float(step.scaler.scale(torch.ones((), device=self.world.device)))
            scale = Scale(times, step.accumulate)
        elif step is not None and step.accumulate > 1:
            scale = Scale(accumulate=step.accumulate)
        return self.calls.take(ranked(live), inputs, chunks, kind, scale, timed)

    def rehearse(
        self, live: RunningPackage, inputs: Sequence[Any], chunks: int, rounds: int, kind: int = 0
    ) -> Rehearsed:
        return self.calls.rehearse(ranked(live), inputs, chunks, kind, rounds)

    def prepared(self, kind: int) -> None:
        if self.world.leads and not self.calls.joined:
            self.calls.tell(kind, runs=False)

    def write(self, do: Callable[[], None]) -> None:
        """Call `do` on the leader while all others wait. If it fails, the others raise RankError."""
        with self.world.interrupts:
            on_each(partial(self.collect, call="save"), lambda: do() if self.leads else None)

    def check_alone(self, method: str) -> None:
        raise FxpipeError(
            f'{method} is for pipes in one process: compile the same plan with a list of devices, as in ["cpu", "cpu"]'
        )

    def check_forward(self) -> None:
        if torch.is_grad_enabled():
            raise FxpipeError(
                "autograd does not reach from one process to another: call pipe.step(...) to train, and "
                "pipe.forward_only(...) to evaluate"
            )

    def check_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        if type(scaler) is torch.amp.GradScaler:
            raise FxpipeError(
                "torch's GradScaler looks for infinite gradients on its own rank alone, so some ranks would skip an "
                "update that others make; use fxpipe.GradScaler(pipe, ...)"
            )

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context for work that all ranks do together. Raises RankError if a rank is lost, or was before, and in a
        forked process."""
        if os.getpid() != self.world.process:
            raise RankError(
                f"this process was forked from rank {self.world.rank}, to which the connections belong: call the pipe "
                "there, or start processes with multiprocessing's 'spawn'"
            )
        with self.lock, self.world.interrupts:
            if self.world.lost is not None:
                again = "compile the model again on all ranks" if self.world.lost.alive else "start all ranks again"
                raise RankError(f"{self.world.lost}; {again}")
            self.world.open.calling = self.number
            try:
                yield
            except Lost as lost:
                raise RankError(str(lost)) from None
            except BaseException as error:
                if self.world.interrupts.broken:
                    self.world.give_up(error)
                raise
            finally:
                self.world.allowance = timedelta(0)
                self.world.open.calling = None

    def leave(self) -> None:
        """Let the other ranks know that this one has closed the pipe; with the error that is being handled."""
        error = sys.exc_info()[1]
        if self._left.detach() is not None:
            self.world.open.leave(self.number, "" if error is None else f"{type(error).__name__}: {error}")

    @property
    def leads(self) -> bool:
        """Whether this is the leader, rank 0; with pipes side by side, the leader of the first pipe."""
        return self.world.leads and (self.parallel is None or self.parallel.beside.leads)

    @property
    def place(self) -> int:
        own = self.world.rank
        return own if self.parallel is None else self.parallel.beside.place(own, len(self.world.labels))

    def collect(self, value: Any, call: str = "collect") -> list[Any]:
        with self.together():
            return self.calls.gather(value, call, self.join_failed_call)

    def collect_all(self, value: Any, call: str = "collect_all") -> list[Any]:
        with self.together():
            values = self.calls.gather(value, call, self.join_failed_call)
            return values if self.parallel is None else self.parallel.beside.collect(values)


def weakly(method: Callable[..., R]) -> Callable[..., R]:
    """A function that calls the method without keeping its object alive. The object itself holds this function: a
    strong reference would make a cycle, and a dropped pipe would stay until Python collects garbage."""
    found = WeakMethod(method)

    def call(*args: Any) -> R:
        alive = found()
        assert alive is not None
        return alive(*args)

    return call


def ranked(live: RunningPackage) -> RankScheduler:
    """The package's scheduler, which must be that of a rank."""
    assert isinstance(live.scheduler, RankScheduler)
    return live.scheduler


def refuse_copy(pipe: Any, memo: dict[int, Any]) -> NoReturn:
    raise FxpipeError("a pipe of several ranks is not copied: copy pipe.model and compile that")


def refuse_pickle(pipe: Any) -> NoReturn:
    raise FxpipeError("a pipe of several ranks is not pickled: save pipe.state_dict() on each rank")
