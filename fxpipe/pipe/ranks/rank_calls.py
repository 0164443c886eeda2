"""A call that all ranks make together: what the leader says before it, and how the others go along.

    rank 0, the leader                         every other rank
    call(given)                                call(given); what was left out has the shapes of the leader's last call
      │                                          │
      ├─ header: kind, seed, new shapes ────────▶├─ other shapes than in the last call? once more, with these
      ▼                                          ▼
    its part of the work, the consensus        its part of the work, the consensus

If the leader fails before the others know of the call, it says why instead. If another rank fails before, it takes part
all the same, and refuses there.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxpipe.capture.nested_values import change
from fxpipe.engines.ranks.rank_engine import RankScheduler, take_step
from fxpipe.engines.ranks.rank_group import LEADER, World
from fxpipe.engines.ranks.step_consensus import describe
from fxpipe.errors import RankError
from fxpipe.ir.timeline import Timeline
from fxpipe.runtime.random import new_seed

from .rank_arguments import Given, check_same, filled, glance, on_meta

NEW = -1  # the number of a kind of call that nobody has seen yet


class Outdated(Exception):
    """The leader's arguments have other shapes than in the last call. Caught in this file."""


@dataclass(frozen=True)
class Header:
    """What the leader says before each call.

    - `kind`: its number, in the order of their first calls; `runs`: whether anything runs.
    - `seed` of the random ops; `scale` of the gradients; `timeline`: whether the step is timed.
    - `given`: the arguments, if they have other shapes than in the last call, pickled, with tensors on the meta device.
    - `failed`: why the leader makes no call.
    """

    kind: int = NEW
    seed: int = 0
    scale: float | None = None
    timeline: bool = False
    runs: bool = True
    given: bytes | None = None
    failed: str | None = None


UNHEARD = Header(failed="interrupted")  # Ctrl-C while waiting for it: it may already be consumed

Call = Callable[[Given], Any]
Refuse = Callable[[Header, Given, BaseException], object]  # takes part in the call, and says why it fails here


class RankCalls:
    """The calls of a pipe, as one rank sees them.

    Of the current call:

    - `header`: what the leader says of it; `waits`: whether this rank has yet to receive that.
    - `joined`: whether this rank takes part, so that all ranks learn of what fails here.

    From one call to the next:

    - `signatures`: meta tensors with the shapes of the leader's arguments; `told`: these as the leader sent them.
    - `seen`: a summary of this rank's own arguments.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.header, self.waits, self.joined = Header(), False, False
        self.signatures: Given = (), {}, None
        self.told: bytes | None = None
        self.seen: tuple[Any, ...] | None = None

    def make(self, call: Call, given: Given, refuse: Refuse) -> Any:
        """What the call returns, made by all ranks together."""
        self.joined = False
        return self._lead(call, given) if self.world.leads else self._follow(call, given, refuse)

    def take(
        self,
        scheduler: RankScheduler,
        inputs: Sequence[Any],
        chunks: int,
        kind: int = 0,
        scale: float | None = None,
        timeline: bool = False,
    ) -> tuple[tuple[Any, ...], Timeline | None]:
        """This rank's part of the work of a call, in which all are from here on: the outputs, and the timeline if there
        is one. The leader's `scale` and `timeline` count. Raises RankError if the call is of another kind there."""
        if self.world.leads:
            self.header = replace(self.header, scale=scale, timeline=timeline)
        header = self._join(kind, scheduler.random)
        return take_step(scheduler, inputs, chunks, header.scale, header.seed, header.timeline)

    def tell(self, kind: int = NEW, seed: int = 0, runs: bool = True) -> Header:
        """The leader's: say what is known of the call, and of a new kind more when there is more."""
        header = replace(self.header, kind=kind, seed=seed, runs=runs)
        self.header, self.joined = replace(header, given=None), True
        self.world.tell_all(pickle.dumps(header))
        return header

    def heard(self) -> Header:
        """What the leader has said. Raises Outdated if its arguments have other shapes than in the last call."""
        if self.waits and self._listen().given is not None:
            raise Outdated
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

    def _lead(self, call: Call, given: Given) -> Any:
        self.header = Header(given=self._news(given))
        try:
            return call(given)
        except BaseException as error:
            if not self.joined:  # nobody else knows yet
                self.told = self.seen = None
                self.world.tell_all(pickle.dumps(Header(failed=describe(error))))
            raise

    def _news(self, given: Given) -> bytes | None:
        """The shapes of the leader's arguments, pickled, if they are not those of the last call."""
        seen = glance(given)
        if seen is not None and seen == self.seen:
            return None
        signatures, before = pickle.dumps(change(given, on_meta)), self.told
        self.told, self.seen = signatures, seen
        return None if signatures == before else signatures

    def _follow(self, call: Call, given: Given, refuse: Refuse) -> Any:
        """If this rank's arguments have the shapes of the last call, the call begins with the leader's shapes of then,
        without waiting for the header, which is heard later. It is made again if the header says that they changed."""
        before, self.seen = self.seen, glance(given)
        self.waits = True
        if self.seen is None or self.seen != before:
            self._listen()
        while True:
            signatures = self.signatures
            try:
                whole = filled(signatures, given)
                check_same(whole, signatures, self.world.rank)
                return call(whole)
            except Outdated:
                continue
            except BaseException as error:
                if self.waits and self._listen().given is not None:
                    continue
                if self.header.failed is None and not self.joined:
                    refuse(self.header, signatures, error)
                raise

    def _listen(self) -> Header:
        """The leader's next header. Raises RankError if it makes no call."""
        self.waits, self.header = False, UNHEARD
        header: Header = pickle.loads(self.world.hear(LEADER))
        self.header = header
        if header.failed is not None:
            raise RankError(f"rank {LEADER}: {header.failed}")
        if header.given is not None:
            self.signatures = pickle.loads(header.given)
        return header
