"""The messages of a step between ranks: sent and received when the program says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxpipe.engines.common.scheduler_base import MiniBatch
from fxpipe.engines.transports.collective_groups import FAILED_PART, Exchange, Marks, mark, marks_of
from fxpipe.engines.transports.communicators import Call
from fxpipe.engines.transports.mailbox import Key
from fxpipe.engines.transports.message_format import (
    WORD,
    Size,
    apart,
    failure,
    order_of,
    read,
    said,
    say,
    seal,
    together,
)
from fxpipe.engines.transports.shared_memory import Slot
from fxpipe.engines.transports.tcp_peer import Frame
from fxpipe.errors import RankError
from fxpipe.ir.program.device_programs import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Message

from .failure_attribution import Lost
from .rank_program import RankCollective, RankMessage, RankProgram
from .replicas.shard_exchange import ShardExchange

T = TypeVar("T")
AHEAD = 32  # the most unfinished sends to one rank; each keeps its buffer


class RankTransport:
    """The messages of one step, as one rank sees them: the mailbox of all stages.

    - `values`: those that stages of this rank have received and not taken, and those that they have made for stages of
      other ranks and that are not sent yet.
    - `pending_receives`: those that have begun, each with the function that waits for its value; `sent`: the unfinished
      sends, by rank.
    - `calls`: what goes together with the next call of `issue`; `issued`: the calls that may not have ended. Both are
      for values on accelerators.
    - `freed`: what is emptied if there is no memory for a message, as this rank then computes nothing more.
    - `idle`: work for this rank while it waits for its first message; None once that is done.
    - `shards`: the exchange that hears of a failure, too, or None.
    - `broken`: whether this rank has failed; `error`: why, or None if another rank failed first.
    """

    def __init__(
        self,
        program: RankProgram,
        batch: MiniBatch,
        rows_of: tuple[int, ...],
        error: BaseException | None,
        idle: Callable[[], object] | None = None,
        shards: ShardExchange | None = None,
    ) -> None:
        """`batch`: this rank's slices; `rows_of`: the samples in each whole micro-batch."""
        self.program, self.world, self.shards = program, program.world, shards
        self.rows_of, self.sizes = rows_of, batch.sizes
        sources = [(source, dim) for _, source, dim in program.table.sizes]
        found = [[(getattr(one, source), dim) for source, dim in sources] for one in batch.micro_batches]
        self.known = [tuple([value if dim is None else value.shape[dim] for value, dim in row]) for row in found]
        self.values: dict[Key, Any] = {}
        self.pending_receives: dict[Key, tuple[RankMessage, Callable[[], Any]]] = {}
        self.sent: dict[int, deque[tuple[Any, Tensor]]] = {rank: deque() for rank in self.world.others}
        self.calls, self.issued = list[Call](), deque[Call]()
        self.freed: list[dict[Any, Any]] = [self.values]
        self.idle, self.broken, self.error = idle, error is not None, error

    def fail(self, error: BaseException | None) -> None:
        """Mark this rank as failed: it computes nothing more. Only the first error is kept."""
        self.error = self.error if self.broken else error
        self.broken = True
        if self.shards is not None:
            self.shards.fail()

    def put(self, message: tuple[Key, Any] | None) -> None:
        if message is not None:
            self.values[message[0]] = message[1]

    def wait(self, key: Key) -> None:
        self.values[key] = self.open_message(key)

    def expect(self, entry: RankMessage) -> None:
        """Post the receive of a message. Raises Lost."""
        if self.world.communicators is not None and entry.scalar_type is None:
            self._expect_apart(entry)
            return
        size = self.size(entry)
        if size is None:
            return
        try:
            receive = self.space(partial(self.world.receive, entry.peer, size))
        except Lost as error:
            self.fail(self.located(error, entry.message))
        else:
            self.pending_receives[entry.key] = entry, partial(self._read, receive, size, entry.scalar_type)

    def _read(self, receive: Callable[[], Tensor], size: Size, scalar_type: str | None) -> Any:
        self._rest()
        return read(receive(), size, scalar_type)

    def _rest(self) -> None:
        """Do what there is time for, as this rank is about to wait."""
        if self.idle is not None:
            idle, self.idle = self.idle, None
            idle()

    def dispatch(self, entry: RankMessage) -> None:
        """Begin to send the value of a message, or, if this rank has failed, the message that says so. Raises Lost."""
        size, peer = self.size(entry), entry.peer
        if size is None:
            return
        beside = self.world.communicators is not None and entry.scalar_type is None
        form = WORD if beside else size
        slot, buffer = self.space(partial(self.world.buffer, peer, form))
        elements = self._written(entry, size, buffer, beside)
        try:
            self._send(peer, slot, buffer)
        except Lost as error:
            self.fail(self.located(error, entry.message))
        if beside:  # after the word, which tells of a failure even if there is no memory for the elements
            self.calls.append(
                Call(True, peer, self.space(partial(self._memory, size)) if elements is None else elements)
            )

    def _send(self, peer: int, slot: Slot | Frame | None, buffer: Tensor) -> None:
        """Begin to send what is written in `buffer`. Raises Lost."""
        if slot is not None:
            self.world.put(slot, peer)
            return
        self.sent[peer].append((self.world.start(True, peer, buffer), buffer))
        while len(self.sent[peer]) > AHEAD:
            self.world.finish(self.sent[peer].popleft()[0], peer)

    def _written(self, entry: RankMessage, size: Size, buffer: Tensor, beside: bool) -> Tensor | None:
        """Write the message of a value, or only its word, into `buffer`; returns the elements that go beside it."""
        if not self.broken and entry.key in self.values:
            value = self.values.pop(entry.key)
            grad = isinstance(value, Tensor) and value.requires_grad
            value = value.detach() if grad else value
            write = apart if beside else seal
            with self._failing(entry):
                elements = write(value, grad, size, buffer)
                return elements if beside else None
        failure(buffer)
        return None

    @contextmanager
    def _failing(self, entry: RankMessage) -> Iterator[None]:
        """A context in which this rank writes the value of a message: an error makes it fail."""
        try:
            yield
        except ValueError as error:
            self.fail(self.program.located(error, entry.message))
        except (RuntimeError, MemoryError) as error:  # no memory for a copy, or an error of the device
            self.fail(error)

    def open_message(self, key: Key) -> Any:
        """Wait for a message: its value. Raises FailedElsewhere if its sender has failed, RankError if a rank is
        lost."""
        entry, opened = self.pending_receives.pop(key)
        try:
            return opened()
        except Lost as error:
            raise self.located(error, entry.message) from None

    # Collectives ------------------------------------------------------------------------------------------------------

    def share(self, line: RankCollective) -> None:
        """Give this rank's part to a collective, or, if it has failed, what says so, and post the receive of what is
        made of all parts. Raises Lost."""
        value = None if self.broken else self.values.pop(line.own.key)
        grad = isinstance(value, Tensor) and value.requires_grad
        exchange = self._form(line)
        post: Any = self._share_together if line.ranks in self.world.collectives.groups else self._share_here
        try:
            opened = post(line, exchange, value if value is None else value.detach(), grad)
        except Lost as error:
            self.fail(self.located(error, line.own.message))
        else:
            self.pending_receives[line.own.key] = line.own, opened

    def _form(self, line: RankCollective) -> Exchange:
        """The types and shapes of a collective of this micro-batch."""
        dtype, shape = size = self.program.size(line.own, self.known[line.micro_batch])
        count, dim = len(line.ranks), line.dim
        length = 0 if line.kind == ALL_REDUCE else shape[dim] * count if line.sliced else shape[dim] // count
        other = size if line.kind == ALL_REDUCE else (dtype, (*shape[:dim], length, *shape[dim + 1 :]))
        given, taken = (size, other) if line.own.message.gradient else (other, size)
        return Exchange(line.kind, count, dim, given, taken, self.world.communicators is None)

    def _share_here(
        self, line: RankCollective, exchange: Exchange, value: Tensor | None, grad: bool
    ) -> Callable[[], Any]:
        """Ranks that share memory send each other their parts, or the slice that the other one needs, and each adds
        them up or joins them, in the same order. Returns a function that waits for the result. Raises Lost."""
        given, taken = exchange.given, exchange.taken
        size = taken if line.kind == REDUCE_SCATTER else given
        own, coming = value, dict[int, Callable[[], Tensor]]()
        for at, peer in enumerate(line.ranks):
            piece = None
            with self._failing(line.own):
                piece = value if value is None or line.kind != REDUCE_SCATTER else exchange.slices(value)[at]
            if peer == self.world.rank:
                own = piece
                continue
            slot, buffer = self.space(partial(self.world.buffer, peer, size))
            with self._failing(line.own):
                seal(piece, grad, size, buffer)
            if self.broken:
                failure(buffer)
            self._send(peer, slot, buffer)
            coming[peer] = self.space(partial(self.world.receive, peer, size))

        def opened() -> Tensor | None:
            parts = [read(coming[rank](), size, None) if rank in coming else own for rank in line.ranks]
            needed = grad or any(part is not None and part.requires_grad for part in parts)
            found = [part.detach() for part in parts if part is not None]
            if not found:
                return None
            if line.kind == ALL_GATHER:
                whole = [found[0].new_zeros(size[1]) if part is None else part.detach() for part in parts]
                return torch.cat(whole, line.dim).requires_grad_(needed)
            return sum(found[1:], start=found[0]).requires_grad_(needed)

        return opened

    def _share_together(
        self, line: RankCollective, exchange: Exchange, value: Tensor | None, grad: bool
    ) -> Callable[[], Tensor | None]:
        """Ranks make one call of their group. Returns a function that waits for the result, or on an accelerator lets
        its stream wait."""
        part, marks, order = None, FAILED_PART, list[int]()
        hosted, device = exchange.marked, self.world.device
        if not self.broken:
            with self._failing(line.own):
                part, marks = exchange.part(value, device), (False, value is not None, grad)
                order = [] if value is None else order_of(value) or []
        if part is None:
            part = self.space(partial(exchange.part, None, device))
        found = self.space(partial(self.world.collectives.space, line.kind, part, line.ranks))
        marks = FAILED_PART if self.broken else marks
        if hosted:
            mark(part, marks)
        words = [] if hosted else self._tell(line.ranks, marks)
        call = self.world.begin_collective(line.kind, line.ranks, part, found)
        if not hosted:
            self.issued.append(call)

        def opened() -> Tensor | None:
            self._rest()
            if hosted:
                self.world.settle(call)
                return exchange.opened(found, marks_of(found), order)
            failed, there, grad = (any(some) for some in zip(marks, *(said(word()) for word in words), strict=True))
            if there and not failed:
                self.world.follow(call)
            return exchange.opened(found, (failed, there, grad), order)

        return opened

    def _tell(self, ranks: Sequence[int], marks: Marks) -> list[Callable[[], Tensor]]:
        """Tell the other ranks of a group the marks of this one's part; returns functions that wait for theirs. Raises
        Lost."""
        words = []
        for peer in ranks:
            if peer != self.world.rank:
                slot, buffer = self.space(partial(self.world.buffer, peer, WORD))
                self._send(peer, slot, say(buffer, marks))
                words.append(self.space(partial(self.world.receive, peer, WORD)))
        return words

    # Values on accelerators -------------------------------------------------------------------------------------------

    def _expect_apart(self, entry: RankMessage) -> None:
        """Add the receive of a value to the batch; its word comes beside it. Raises Lost."""
        size = self.size(entry)
        if size is None:
            return
        word = self.space(partial(self.world.receive, entry.peer, WORD))
        call = Call(False, entry.peer, self.space(partial(self._memory, size)))
        self.calls.append(call)
        self.pending_receives[entry.key] = entry, partial(self._join, word, size, call)

    def _memory(self, size: Size) -> Tensor:
        """Memory for the elements of a value."""
        return torch.empty(prod(size[1]) * size[0].itemsize, dtype=torch.uint8, device=self.world.device)

    def _join(self, word: Callable[[], Tensor], size: Size, call: Call) -> Any:
        """The value whose word and elements come apart. Raises Lost."""

        def elements() -> Tensor:
            self.world.follow(call)
            return call.tensor

        return together(word(), size, elements)

    def issue(self) -> None:
        """Begin the sends and receives of a batch. Raises Lost."""
        calls, self.calls = self.calls, []
        while self.issued and (self.issued[0].work is None or self.issued[0].work.is_completed()):
            self.issued.popleft()
        self.issued += calls
        self.world.exchange(calls)

    def space(self, make: Callable[[], T]) -> T:
        """What `make` returns, which takes memory for a message. If there is none, this rank fails, and frees what its
        step keeps, as messages go on all the same. Raises Lost if that is not enough."""
        try:
            return make()
        except (RuntimeError, MemoryError) as error:
            self.fail(error)
            for kept in self.freed:
                kept.clear()
        try:
            return make()
        except (RuntimeError, MemoryError) as error:
            raise self.world.give_up(error) from None

    def size(self, entry: RankMessage) -> Size | None:
        """The type and shape of a message's value; None if the two replicas have no samples in common."""
        i, route = entry.message.micro_batch, entry.route
        size = self.program.size(entry, () if i is None else self.known[i])
        if i is None or route is None:
            return size
        shares = self.program.routes.pieces(self.rows_of[i], entry.message.target, route)
        rows = next((rows for source, target, rows in shares if (source, target) == entry.message.replicas), None)
        if rows is None:
            return None
        dim, own = route.dim, self.sizes[i]
        if dim is None or rows == own:
            return size
        dtype, shape = size
        return dtype, (*shape[:dim], shape[dim] // own * rows, *shape[dim + 1 :])

    def located(self, error: Lost, message: Message) -> Exception:
        """A RankError with a note of the message to or from the lost rank."""
        return self.program.located(RankError(str(error)), message)
