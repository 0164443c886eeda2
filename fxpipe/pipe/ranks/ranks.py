"""The ranks of a pipe, as one of them sees them: what they do together, and how they agree on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch

from fxpipe.engines.ranks.rank_engine import RankScheduler
from fxpipe.engines.ranks.rank_group import Lost, World
from fxpipe.errors import FxpipeError, RankError
from fxpipe.pipe.fork_lock import Lock
from fxpipe.pipe.live import Live
from fxpipe.pipe.options.option_table import check_accumulate

from .parallelize import Parallel
from .rank_arguments import Given
from .rank_calls import CALL, Call, Header, RankCalls, Refuse


class Ranks:
    """The ranks of `world`. `calls`: what they say of each call; `lock`: of the pipe; `parallel`: pipes beside it."""

    def __init__(self, world: World) -> None:
        self.world, self.calls, self.lock = world, RankCalls(world), Lock()
        self.parallel: Parallel | None = None

    def call(self, call: Call, given: Given, refuse: Refuse, header: Header = CALL, trains: bool | None = None) -> Any:
        """What a call returns that all ranks make together; see `RankCalls`. `trains`: of a call that pipes side by
        side make together, whether it does."""
        beside = nullcontext() if self.parallel is None or trains is None else self.parallel.call(trains)
        with beside, self.together():
            return self.calls.make(call, given, refuse, header)

    @contextmanager
    def together(self) -> Iterator[None]:
        """In this context is what all ranks do at once. Raises RankError if one is lost, now or before."""
        if os.getpid() != self.world.process:
            raise RankError(
                f"this process was forked from rank {self.world.rank}, to which the connections belong: call the pipe "
                "there, or start processes with multiprocessing's 'spawn'"
            )
        with self.lock:
            if self.world.lost is not None:
                raise RankError(f"{self.world.lost}; start all ranks again")
            try:
                yield
            except Lost as lost:
                raise RankError(str(lost)) from None

    def set_scale(self, scaler: torch.amp.GradScaler | None, accumulate: int) -> None:
        """What the gradients of the call under way are multiplied with, where those of `accumulate` steps are to be one
        mean. Raises FxpipeError for a scaler that looks at one rank alone."""
        accumulate = check_accumulate(accumulate)
        scale = 1 / accumulate if accumulate > 1 else None
        if type(scaler) is torch.amp.GradScaler:
            raise FxpipeError(
                "this GradScaler sees the infinities of one rank alone, so ranks would skip other steps; use "
                "fxpipe.GradScaler(pipe, ...)"
            )
        if scaler is not None:
            scale = float(scaler.scale(torch.ones((), device=self.world.device))) / accumulate
        self.calls.set_scale(scale)

    @property
    def leads(self) -> bool:
        """Whether this is the leader, rank 0; of pipes side by side, that of the first."""
        return self.world.leads and (self.parallel is None or self.parallel.beside.leads)

    @property
    def place(self) -> int:
        own = self.world.rank
        return own if self.parallel is None else self.parallel.beside.place(own, len(self.world.labels))

    def collect(self, value: Any) -> list[Any]:
        with self.together():
            return self.world.collect(value)

    def collect_all(self, value: Any) -> list[Any]:
        values = self.collect(value)
        if self.parallel is None:
            return values
        with self.together():
            return self.parallel.beside.collect(values)


def ranked(live: Live) -> RankScheduler:
    """The scheduler of this rank."""
    assert isinstance(live.scheduler, RankScheduler)
    return live.scheduler


def forward(pipe: Any, *args: Any, **kwargs: Any) -> Any:
    """As `forward_only`. Raises FxpipeError where gradients are wanted."""
    if torch.is_grad_enabled():
        raise FxpipeError(
            "autograd does not reach from one process to another: call pipe.step(...) to train, and "
            "pipe.forward_only(...) to evaluate"
        )
    return pipe.forward_only(*args, **kwargs)


def refuse_copy(pipe: Any, memo: dict[int, Any]) -> NoReturn:
    raise FxpipeError("a pipe over ranks is not copied: copy pipe.model and compile that")


def refuse_pickle(pipe: Any) -> NoReturn:
    raise FxpipeError("a pipe over ranks is not pickled: save pipe.state_dict() on each rank")
