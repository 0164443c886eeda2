"""Replicas of a stage all-gather its parameters, and reduce-scatter their gradients, in the middle of an action.

All replicas run the same ops in the same order, so what comes next is the same on all. But one of them may fail between
two exchanges. A collective would hang then. So before the elements each tells all others, in a small message, that it
goes on, and with which parameter:

    replica 0    "at 3" ──▶  ◀── rows of 3 ──▶    "at 4" ──▶
    replica 1    "at 3" ──▶  ◀── rows of 3 ──▶    fails, says so    so no rows of 4 move, and all fail

A rank that fails says so at once, and does not wait; the others hear it at their next exchange, which may be the one at
the end of the step. Each rank sends one message for each exchange until the failure is known, so none is left over.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from fxpipe.engines.ranks.failure_attribution import Lost
from fxpipe.engines.ranks.rank_group import World
from fxpipe.engines.transports.message_format import FailedElsewhere
from fxpipe.errors import FxpipeError, RankError
from fxpipe.runtime.autograd.gathered_parameters import Sharded

SHARDS = 2  # the tag of these messages
# Sent in place of the number of an exchange. That is 2k to gather parameter k, 2k + 1 to reduce-scatter its gradient.
FAILED, END = -1, -2


class ShardExchange:
    """The exchanges of one rank with the other replicas of its stages, in one step after the other.

    - `ranks`: the replicas, in the order of the shards.
    - `known`: whether this step has no more exchanges, as all replicas have come to its end or one has failed, and this
      rank knows it; `failed`: whether this rank has said that it has failed.
    """

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.world, self.ranks, self.place = world, tuple(ranks), ranks.index(world.rank)
        self.others = [(k, rank) for k, rank in enumerate(ranks) if rank != world.rank]
        self.known, self.failed = True, False
        self._sent: list[tuple[Any, Tensor, int]] = []

    def begin(self, failed: bool) -> None:
        """Begin a step, in which this rank may have failed before."""
        self.known = self.failed = False
        if failed:
            self.fail()

    def gather(self, one: Sharded) -> Tensor:
        """The whole parameter. Raises FailedElsewhere if a replica has failed, RankError if one is at another op."""
        whole = torch.empty(one.shape, dtype=one.part.dtype)
        rows, mine = split(whole, one.shards.rows), _rows(one)
        self._agree(2 * one.shards.number)
        works = [(self._start(False, rank, rows[k]), rank) for k, rank in self.others]
        works += [(self._start(True, rank, mine), rank) for _, rank in self.others]
        rows[self.place].copy_(mine)
        for work, rank in works:
            self._finish(work, rank)
        return whole

    def scatter(self, one: Sharded, gradient: Tensor) -> Tensor:
        """This rank's rows of the sum of the gradients of all replicas, added up in their order. Raises as `gather`,
        and FxpipeError for a sparse gradient."""
        if gradient.layout != torch.strided:
            raise FxpipeError(
                "a gradient is sparse, and the parameter is sharded over replicas (ZeRO-3): write sparse=False"
            )
        rows, total, came = self._room(one, gradient)
        self._agree(2 * one.shards.number + 1)
        return self._summed(rows, total, came)

    def _room(self, one: Sharded, gradient: Tensor) -> tuple[Sequence[Tensor], Tensor, Tensor]:
        """The rows of all replicas, and room for the sum of this one's and for what comes. Nobody waits for it yet."""
        rows = split(gradient.contiguous(), one.shards.rows)
        own = rows[self.place]
        return rows, torch.empty_like(own), torch.empty_like(own)  # the others' rows come one after the other

    def _summed(self, rows: Sequence[Tensor], total: Tensor, came: Tensor) -> Tensor:
        own = rows[self.place]
        sent = [(self._start(True, rank, rows[k]), rank) for k, rank in self.others]
        for k, rank in enumerate(self.ranks):
            part = own
            if rank != self.world.rank:
                part = came
                self._finish(self._start(False, rank, came), rank)
            total.copy_(part) if k == 0 else total.add_(part)
        for work, rank in sent:
            self._finish(work, rank)
        return total

    def fail(self) -> None:
        """Tell the other replicas that this rank has failed, without waiting for them."""
        if not self.known and not self.failed:
            self.failed = True
            with suppress(Lost):  # they see it too
                self._tell(FAILED)

    def end(self) -> None:
        """End a step: hear whether all have come to its end. Raises FailedElsewhere if not."""
        try:
            if self.failed and not self.known:
                self._hear()
            elif not self.known:
                self._agree(END)
        finally:
            self.known, sent, self._sent = True, self._sent, []
            for work, _, rank in sent:
                self.world.finish(work, rank)

    def give(self, ones: Sequence[Sharded], all_of_them: bool) -> list[Tensor]:
        """These parameters, whole, on all replicas, or on the first one and nothing on the others. Between steps: all
        replicas make this call. Raises Lost."""
        takers = [rank for k, rank in self.others if all_of_them or k == 0]
        sent = [(self._start(True, rank, rows), rank, rows) for rows in map(_rows, ones) for rank in takers]
        found: list[Tensor] = []
        if all_of_them or not self.place:
            try:
                found = [torch.empty(one.shape, dtype=one.part.dtype) for one in ones]
            except (RuntimeError, MemoryError) as error:
                raise self.world.give_up(error) from None
        for one, whole in zip(ones, found, strict=bool(found)):
            rows = split(whole, one.shards.rows)
            rows[self.place].copy_(_rows(one))
            for k, rank in self.others:
                self._finish(self._start(False, rank, rows[k]), rank)
        for work, rank, _ in sent:
            self._finish(work, rank)
        return found

    def take(self, one: Sharded, gradient: Tensor | None) -> Tensor:
        """This replica's rows of the sum of the gradients of the whole parameter that replicas have. After a step: all
        replicas make this call. Raises Lost."""
        whole = torch.zeros(one.shape, dtype=one.part.dtype) if gradient is None else gradient
        return self._summed(*self._room(one, whole))

    # Messages ---------------------------------------------------------------------------------------------------------

    def _agree(self, number: int) -> None:
        """Tell all replicas which exchange this rank is at, and hear theirs."""
        if self.known or self.failed:
            raise FailedElsewhere
        before, self._sent = self._sent, []
        self._tell(number)
        heard = self._hear()
        for work, _, rank in before:  # all have heard these, as they have gone on since
            self.world.finish(work, rank)
        if any(one != number for one in heard):
            self.known = True
            if FAILED in heard:
                raise FailedElsewhere
            raise RankError(
                f"the replicas of a stage do not run the same ops: this one is at exchange {number}, others at "
                f"{heard}; a model that chooses its ops by values cannot be sharded over replicas (ZeRO-3)"
            )

    def _tell(self, number: int) -> None:
        for _, rank in self.others:
            word = torch.tensor([number])
            self._sent.append((self.world.start(True, rank, word, SHARDS), word, rank))

    def _hear(self) -> list[int]:
        """The exchange that each other replica is at."""
        words = [torch.empty(1, dtype=torch.int64) for _ in self.others]
        works = [
            self.world.start(False, rank, word, SHARDS) for (_, rank), word in zip(self.others, words, strict=True)
        ]
        for (_, rank), work in zip(self.others, works, strict=True):
            self.world.finish(work, rank)
        return [int(word) for word in words]

    def _start(self, send: bool, rank: int, rows: Tensor) -> Any:
        """Begin to send rows to a replica, or to receive some; None if there are none."""
        return self.world.start(send, rank, rows, SHARDS) if rows.numel() else None

    def _finish(self, work: Any, rank: int) -> None:
        if work is not None:
            self.world.finish(work, rank)


def split(whole: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
    """The parts of so many rows each."""
    found: Sequence[Tensor] = torch.split_with_sizes(whole, rows)
    return found


def _rows(one: Sharded) -> Tensor:
    return one.part.detach().contiguous()
