"""A call that all ranks make together: the leader sends a header, and the other ranks follow it.

    rank 0, the leader                         every other rank
    call(given)                                call(given); left-out arguments have the shapes of the leader's last call
      │                                          │
      ├─ announcement, if shapes are new ───────▶├─ repeat the call with these
      │  finds or captures the call's graph      │  finds or captures the call's graph
      ├─ header: kind, seed ────────────────────▶│
      ▼                                          ▼
    its part of the work, the consensus        its part of the work, the consensus

Because of the announcement, all ranks capture at the same time. If the leader fails before it has sent the header of a
call, it sends the error instead. If another rank fails before its part of the work, it still takes part in the call,
and reports the error in the consensus.

Collecting values (`gather`), as in a checkpoint, begins with a header, too. So ranks that are in different calls, as
with `if rank == 0: save_checkpoint(...)`, hear of it at once: the header tells which call the leader is in, and the
answer which one the other rank is in.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from fxpipe.capture import NO_TARGET
from fxpipe.capture.nested_values import change
from fxpipe.engines.common.gradient_scale import Scale
from fxpipe.engines.ranks.input_checksums import Unread
from fxpipe.engines.ranks.rank_engine import RankScheduler, take_step
from fxpipe.engines.ranks.rank_group import COMPILING, World
from fxpipe.engines.ranks.rendezvous import LEADER
from fxpipe.engines.ranks.step_consensus import describe
from fxpipe.engines.rehearsal.action_profiler import Rehearsed
from fxpipe.engines.rehearsal.rank_profiler import rehearse_ranks
from fxpipe.errors import RankError
from fxpipe.ir.timeline import Timeline
from fxpipe.runtime.random import new_seed

from .rank_arguments import CallArguments, check_same, checksums, filled, glance, on_meta

NEW = -1  # the number of a kind of call that is new


class Outdated(Exception):
    """The leader's arguments have other shapes than in the last call. Caught in this file."""


@dataclass(frozen=True)
class Header:
    """What the leader sends before each call. With `given`, it is an announcement, which the header itself follows.

    - `kind`: the number of the kind of call, in the order of first calls, or NEW.
    - `seed`: of the random ops.
    - `scale`: factor of the gradients.
    - `timeline`: whether the step is timed; `rounds`: how often it is rehearsed.
    - `runs`: whether anything runs.
    - `given`: None, or, if shapes differ from the last call, the pickled arguments, with tensors on the meta device.
    - `failed`: the error, if the leader makes no call.
    - `target`: whether the leader was given a target.
    - `call`: the name of the call in errors; `gathers`: whether values are collected, and nothing else.
    """

    kind: int = NEW
    seed: int = 0
    scale: Scale | None = None
    timeline: bool = False
    rounds: int = 0
    runs: bool = True
    given: bytes | None = None
    failed: str | None = None
    target: bool = False
    call: str = "step"
    gathers: bool = False


UNHEARD = Header(failed="not heard")  # while waiting for the header: the leader may be lost

Call = Callable[[CallArguments], Any]
JoinFailedCall = Callable[
    [Header, CallArguments, BaseException], object
]  # takes part in the call, and reports this rank's error


class RankCalls:
    """The calls of a pipe, as one rank sees them.

    Of the current call:

    - `header`: the leader's header; `waits`: whether this rank has not received it yet.
    - `joined`: whether this rank has begun its part, so that all ranks learn of an error here.
    - `name`: the name of this rank's call in errors; `target`: whether it was given a target.
    - `given`: computes the checksums of this rank's own arguments; none without `check_inputs`.

    From one call to the next:

    - `signatures`: meta tensors with the shapes of the leader's arguments; `sent`: the same, pickled, on the leader.
    - `seen`: a summary of this rank's own arguments.
    """

    def __init__(self, world: World, check_inputs: bool = True) -> None:
        self.world, self.check_inputs = world, check_inputs
        self.given: Callable[[], Unread] = dict
        self.header, self.waits, self.joined, self.name = Header(), False, False, "step"
        self.target = False
        self.signatures: CallArguments = (), {}, None
        self.sent: bytes | None = None
        self.seen: tuple[Any, ...] | None = None

    def make(self, call: Call, given: CallArguments, join_failed_call: JoinFailedCall, name: str = "step") -> Any:
        """Make a call together with all ranks; returns its result."""
        self.joined, self.name, self.target = False, name, given[2] is not None and given[2] is not NO_TARGET
        compares = self.check_inputs and name != "prepare"

        def checked(whole: CallArguments) -> Any:
            self.given = partial(checksums, given) if compares else dict
            return call(whole)

        return self._lead(checked, given) if self.world.leads else self._follow(checked, given, join_failed_call)

    def gather(self, value: Any, name: str, join_failed_call: JoinFailedCall) -> list[Any]:
        """The values of all ranks, in order, on all ranks. Raises RankError if some are in another call."""
        world = self.world
        self.name = name
        if world.leads:
            world.tell(*world.others, data=pickle.dumps(Header(call=name, gathers=True, runs=False)))
            answers = [(name, value), *(pickle.loads(world.hear(peer)) for peer in world.others)]
            world.broadcast(answers)
            return values_of(answers)
        header = self._read()
        if header.given is not None:
            header = self._read()
        if header.gathers:
            return self._answer(value)
        self.header = header
        if header.failed is not None:
            raise RankError(f"rank {LEADER}, in {header.call}: {header.failed}")
        self.joined = False
        error = self._elsewhere(header)
        join_failed_call(header, self.signatures, error)
        raise error

    def _answer(self, value: Any = None) -> list[Any]:
        """Take part in the leader's `gather`."""
        self.world.tell(LEADER, data=pickle.dumps((self.name, value)))
        return values_of(self.world.broadcast())

    def _elsewhere(self, header: Header) -> RankError:
        return RankError(in_calls([(LEADER, header.call), (self.world.rank, self.name)]))

    def take(
        self,
        scheduler: RankScheduler,
        inputs: Sequence[Any],
        chunks: int,
        kind: int = 0,
        scale: Scale | None = None,
        timeline: bool = False,
    ) -> tuple[tuple[Any, ...], Timeline | None]:
        """Run this rank's part of a call; from here on all ranks take part. Returns the outputs, and the timeline if
        there is one. The leader's `scale` and `timeline` are used. Raises RankError if the leader's call is of another
        kind."""
        if self.world.leads:
            self.header = replace(self.header, scale=scale, timeline=timeline)
        header = self._join(kind, scheduler.random)
        return take_step(scheduler, inputs, chunks, header.scale, header.seed, header.timeline, self.given)

    def rehearse(
        self, scheduler: RankScheduler, inputs: Sequence[Any], chunks: int, kind: int, rounds: int
    ) -> Rehearsed:
        """Rehearse a step on this rank; the leader's `rounds` are used."""
        if self.world.leads:
            self.header = replace(self.header, rounds=rounds)
        with torch.random.fork_rng(devices=[]):
            header = self._join(kind, scheduler.random)
        return rehearse_ranks(scheduler, inputs, chunks, header.rounds, header.seed, self.given)

    def tell(self, kind: int = NEW, seed: int = 0, runs: bool = True) -> Header:
        """On the leader: send the header with what is known so far. For a new kind, a second header follows later."""
        self.world.interrupts.close()  # from here on the others count on this rank
        self.header, self.joined = replace(self.header, kind=kind, seed=seed, runs=runs), True
        self.world.tell(*self.world.others, data=pickle.dumps(self.header))
        return self.header

    def heard(self) -> Header:
        """The leader's header. Raises Outdated if its arguments have other shapes than in the last call."""
        self.world.interrupts.close()  # from here on the others count on this rank
        if self.waits and self._listen().given is not None:
            raise Outdated
        if self.header.call != self.name:
            raise self._elsewhere(self.header)
        if self.target and not self.header.target:
            raise RankError(self._alone())
        return self.header

    def _join(self, kind: int, random: bool) -> Header:
        if self.world.leads:
            return self.tell(kind, new_seed() if random else 0)
        header = self.heard()
        header = self._listen() if header.kind == NEW else header
        if header.kind != kind:
            raise RankError(
                f"this call is of another kind on rank {self.world.rank} than on rank {LEADER}: is the model in "
                "training on one and in evaluation on the other, or does the loss function differ?"
            )
        self.joined = True
        return header

    def _lead(self, call: Call, given: CallArguments) -> Any:
        self.header, shapes = Header(target=self.target, call=self.name), self._changed_shapes(given)
        try:
            if shapes is not None:
                self.world.tell(*self.world.others, data=pickle.dumps(replace(self.header, given=shapes)))
            with self.world.interrupts.let_in():
                return call(given)
        except BaseException as error:
            if not self.joined:  # no header was sent yet
                self.sent = self.seen = None
                failed = pickle.dumps(replace(self.header, failed=describe(error)))
                self.world.tell(*self.world.others, data=failed)
            raise

    def _changed_shapes(self, given: CallArguments) -> bytes | None:
        """The shapes of the leader's arguments, pickled; None if they are those of the last call."""
        seen = glance(given)
        if seen is not None and seen == self.seen:
            return None
        signatures, before = pickle.dumps(change(given, on_meta)), self.sent
        self.sent, self.seen = signatures, seen
        return None if signatures == before else signatures

    def _follow(self, call: Call, given: CallArguments, join_failed_call: JoinFailedCall) -> Any:
        """Make the call on a rank that is not the leader. If this rank's arguments have the shapes of the last call, it
        begins at once with the leader's shapes of the last call, and the header is received later. If an announcement
        says that the leader's shapes have changed, the call is repeated with the new ones."""
        before, self.seen = self.seen, glance(given)
        self.waits = True
        if self.seen is None or self.seen != before:
            self.world.allowance = COMPILING  # the leader may be
            if self._listen().given is None:
                self.world.allowance = timedelta(0)
        while True:
            try:
                whole = filled(self.signatures, given)
                check_same(whole, self.signatures, self.world.rank)
                with self.world.interrupts.let_in():
                    return call(whole)
            except Outdated:
                continue
            except BaseException as error:
                if self.waits and self._listen().given is not None:
                    if isinstance(error, Exception):  # perhaps because of the old shapes
                        continue
                    self._listen()
                if self.header.failed is None and not self.joined:
                    join_failed_call(self.header, self.signatures, error)
                raise

    def _listen(self) -> Header:
        """The leader's next header or announcement. Raises RankError if it makes no call."""
        self.waits, self.header = False, UNHEARD
        header = self._read()
        self.waits = header.given is not None
        if header.gathers:  # this rank is in another call; its answer says so
            self._answer()
        self.header = header
        if header.failed is not None:
            raise RankError(
                f"rank {LEADER}: {header.failed}" + f"\n{self._alone()}" * (self.target and not header.target)
            )
        return header

    def _read(self) -> Header:
        header: Header = pickle.loads(self.world.hear(LEADER))
        if header.given is not None:
            self.signatures = pickle.loads(header.given)
            self.world.allowance = COMPILING  # until the call has ended: the leader captures, perhaps
        return header

    def _alone(self) -> str:
        return (
            f"target is given on rank {self.world.rank} and not on rank {LEADER}, which needs it, too: its call says "
            "what all ranks compute. If no stage there uses the values, the shape is enough: "
            "target=torch.empty(shape, dtype=..., device='meta')"
        )


def values_of(answers: Sequence[tuple[str, Any]]) -> list[Any]:
    """The values of ranks, each after the name of the call that it is in. Raises RankError if these differ."""
    if len({name for name, _ in answers}) > 1:
        raise RankError(in_calls([(rank, name) for rank, (name, _) in enumerate(answers)]))
    return [value for _, value in answers]


def in_calls(names: Sequence[tuple[int, str]]) -> str:
    """The text of the error that ranks are in different calls.

    >>> in_calls([(0, "save_checkpoint"), (1, "step")])
    'rank 0 is in save_checkpoint, rank 1 is in step: all ranks make the same calls; no call is for one rank alone'
    """
    where = ", ".join(f"rank {rank} is in {name}" for rank, name in names)
    return f"{where}: all ranks make the same calls; no call is for one rank alone"
