"""The processes of a pipe: a rank for each device, their connections, and small messages between them.

torch.distributed's collectives do not help if a rank may be gone: its neighbours get an error, the others wait for
ever. So all messages go from one rank to another, and ranks agree through the leader, rank 0, which sees at once that a
rank is gone; if the leader is gone, all see it.

A value in host memory goes through shared memory (`same_machine.py`), in a third of the time; where ranks share none,
or it does not fit, by TCP (`tcp_peer.py`) up to `SMALL` bytes, else by gloo. A small message (letter) goes by TCP, but
for its first `BLOCK - COUNT` bytes where memory is shared. Values on accelerators: see `communicators.py`.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from time import monotonic, sleep
from typing import Any, cast

import torch
from torch import Tensor

from fxpipe.engines.transports.collective_groups import CollectiveGroups
from fxpipe.engines.transports.communicators import PAUSE, Call, Communicators, ended
from fxpipe.engines.transports.message_format import Size, blank
from fxpipe.engines.transports.open_pipes import OpenPipes, divided, left_text
from fxpipe.engines.transports.patience import SOON, Patience
from fxpipe.engines.transports.same_machine import LocalPeer
from fxpipe.engines.transports.shared_memory import BLOCK, Slot
from fxpipe.engines.transports.tcp_peer import LETTER, VALUE, Frame, TcpPeer
from fxpipe.runtime.interrupts import InterruptShield

from .failure_attribution import Lost, blame, said_by, silent, timed_out
from .rendezvous import LEADER

COMPILING = timedelta(hours=1)  # how much longer a wait may take while ranks compile
COUNT = 8  # bytes of the length that precedes a small message


@dataclass(eq=False)
class World:
    """The ranks of one pipe, as one of them sees it.

    - `group`: their ProcessGroup, for collectives.
    - `labels`: the labels of the devices, by rank; `device`: this rank's device.
    - `control`: the two process groups for large values in host memory: to smaller and to larger ranks.
    - `tcp_peers`: the connections to all other ranks for what is small.
    - `timeout`: seconds after which a rank that does not answer counts as lost; `limit`: the same as a timedelta;
      `allowance`: how much longer a wait may take now, as ranks may be compiling.
    - `store`: where ranks that notice a loss write it; `lost`: why no further step is possible, or None.
    - `local_peers`: the ranks that share memory with this one; `open`: the pipes that share these connections.
    - `steps`: the number of steps begun; `process`: the id of this process, as a fork cannot use the connections.
    - `interrupts`: the context of all messages, in which Ctrl-C waits.
    - `communicators`: the process groups for values on accelerators, or None if values go through host memory;
      `collectives`: the groups for collectives.
    """

    group: Any
    rank: int
    labels: tuple[str, ...]
    device: torch.device
    control: Any
    tcp_peers: dict[int, TcpPeer]
    timeout: float
    store: Any
    collectives: CollectiveGroups
    lost: Lost | None = None
    limit: timedelta = field(init=False)
    allowance: timedelta = timedelta(0)
    local_peers: dict[int, LocalPeer] = field(default_factory=dict)
    steps: int = 0
    open: OpenPipes = field(init=False)
    process: int = field(default_factory=os.getpid)
    communicators: Communicators | None = None
    interrupts: InterruptShield = field(default_factory=InterruptShield)

    def __post_init__(self) -> None:
        self.limit = timedelta(seconds=self.timeout)
        self.open = OpenPipes(self.rank, self.tcp_peers)

    @property
    def label(self) -> str:
        return self.labels[self.rank]

    @property
    def others(self) -> Sequence[int]:
        return [rank for rank in range(len(self.labels)) if rank != self.rank]

    @property
    def leads(self) -> bool:
        return self.rank == LEADER

    @property
    def patience(self) -> timedelta:
        """How long a wait may take now."""
        return self.limit + self.allowance

    # One message ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a step, on every rank: the places for values in shared memory are free again."""
        self.steps += 1
        for local_peer in self.local_peers.values():
            local_peer.begin(self.steps)

    def slot(self, send: bool, peer: int, size: Size) -> Slot | None:
        """The place in shared memory of the next value to or from a rank; None if they share none, or none is left."""
        local_peer = self.local_peers.get(peer)
        return None if local_peer is None else (local_peer.out if send else local_peer.into).slot(size)

    def buffer(self, peer: int, size: Size) -> tuple[Slot | Frame | None, Tensor]:
        """The message buffer of the next value to a rank, and where it lies; None: it is sent by gloo."""
        slot = self.slot(True, peer, size) or self.tcp_peers[peer].frame(size)
        return slot, blank(size) if slot is None else slot.tensor(size)

    def receive(self, peer: int, size: Size) -> Callable[[], Tensor]:
        """Post the receive of a value in host memory. Returns a function that waits for the message and returns it.
        Both raise Lost."""
        slot = self.slot(False, peer, size)
        if slot is not None:

            def left() -> Tensor:
                self.wait(peer, slot.there)
                return slot.tensor(size).clone()  # the next step overwrites this place, and the value may live longer

            return left
        tcp_peer = self.tcp_peers[peer]
        if tcp_peer.fits(size):
            place = tcp_peer.next(VALUE)

            def came() -> Tensor:
                self.wait_apart(peer, lambda: place in tcp_peer.found)
                return torch.frombuffer(tcp_peer.found.pop(place), dtype=size[0])

            return came
        buffer = blank(size)
        work = self.start(False, peer, buffer)

        def sent() -> Tensor:
            self.finish(work, peer)
            return buffer

        return sent

    def put(self, slot: Slot | Frame, peer: int) -> None:
        """Send a value that is written in its message buffer: publish it in shared memory, and wake its receiver, or
        write it to the connection. Raises Lost."""
        if isinstance(slot, Slot):
            slot.stamp()
            self.local_peers[peer].ring()
            return
        try:
            self.tcp_peers[peer].send(slot.data)
        except RuntimeError as error:
            raise self.lose(peer, error) from None

    def wait(self, peer: int, there: Callable[[], bool]) -> None:
        """Wait for a rank on the same machine until `there()` is true. Raises Lost."""
        self._await(self.local_peers[peer], peer, there)

    def wait_apart(self, peer: int, there: Callable[[], bool]) -> None:
        """Wait for what comes or goes by TCP until `there()` is true. Raises Lost."""
        self._await(self.tcp_peers[peer], peer, there)

    def _await(self, way: LocalPeer | TcpPeer, peer: int, there: Callable[[], bool]) -> None:
        patience = Patience(self.patience.total_seconds() if self.lost is None else 0.0)
        while True:
            try:
                return way.wait(there, min(patience.left, SOON))
            except RuntimeError as error:
                if patience.spent() or not timed_out(error):
                    raise self.lose(peer, error) from None
            self._hear(peer, there)
            self._hurry(patience)

    def start(self, send: bool, peer: int, tensor: Tensor, tag: int = 0) -> Any:
        """Begin to send a tensor in host memory, or to receive into it, by gloo. What has another tag has an order of
        its own. Raises Lost."""
        try:
            group = self.control[send == (peer > self.rank)]
            return (group.send if send else group.recv)([tensor], peer, tag)
        except RuntimeError as error:
            raise self.lose(peer, error) from None

    def finish(self, work: Any, peer: int) -> None:
        """Wait until a send or receive of `start` is done. Raises Lost."""
        try:
            work.wait(self.patience)
        except RuntimeError as error:
            raise self.lose(peer, error) from None

    def exchange(self, calls: Sequence[Call]) -> None:
        """Begin sends and receives that go together, of tensors of bytes on this rank's device. Raises Lost."""
        if self.communicators is None:
            for call in calls:
                call.work = self.start(call.send, call.peer, call.tensor)
            return
        if self.lost is not None:
            raise self.lost
        try:
            self.communicators.exchange(calls)
        except RuntimeError as error:
            raise self.give_up(error) from None

    def follow(self, call: Call) -> None:
        """Let what this rank computes next wait for a call of `exchange`: on an accelerator its stream waits, not the
        host. Raises Lost."""
        if self.lost is not None:
            raise self.lost
        if self.communicators is None or self.device.type == "cpu":
            self.settle(call)
        elif call.work is not None:
            call.work.wait()

    def settle(self, call: Call) -> None:
        """Wait on the host until a call of `exchange` or `begin_collective` is done. Raises Lost."""
        if call.work is None:
            return
        if self.lost is not None:
            raise self.lost
        if self.communicators is None and not call.ranks:
            self.finish(call.work, call.peer)
            return
        patience = Patience(self.patience.total_seconds())
        while not ended(call.work, self.communicators is None):
            self._look()
            self._hurry(patience)
            if patience.spent():
                raise self._late(call)
        try:
            call.work.wait()
        except RuntimeError as error:
            if self.communicators is not None:
                raise self.give_up(error) from None
            self._look(SOON)  # gloo does not say which rank is gone
            raise self._late(call) from None

    def _late(self, call: Call) -> Lost:
        """What is lost after a call has timed out."""
        peer = silent(self.store, self.rank, call.ranks, self.timeout / 4) if call.ranks else call.peer
        return self.lose(peer, "timed out")

    def _look(self, seconds: float = 0.0) -> None:
        """Raise Lost if another rank is gone, or has given up, now or within so many seconds."""
        end = monotonic() + seconds
        while True:
            for peer, tcp_peer in self.tcp_peers.items():
                try:
                    tcp_peer.read()
                except RuntimeError as error:
                    raise self.lose(peer, error) from None
                if (said := said_by(tcp_peer)) is not None:
                    raise self._close(said)
            if monotonic() >= end:
                return
            sleep(PAUSE)

    def _hear(self, peer: int, there: Callable[[], bool]) -> None:
        """Raise Lost if a rank has given up, or `peer`, for which this one waits, has closed the pipe."""
        for tcp_peer in self.tcp_peers.values():
            if (said := said_by(tcp_peer)) is not None:
                raise self._close(said)
        if (why := self.open.left_by(peer)) is not None and not there():
            raise self._close(Lost(peer, why))

    def _hurry(self, patience: Patience) -> None:
        """Raise Lost, and tell the others, if Ctrl-C ends a wait."""
        if self.interrupts.ends(patience.began):
            raise self._close(Lost(self.rank, left_text(self.rank, type(self.interrupts.error).__name__)))

    # Collectives ------------------------------------------------------------------------------------------------------

    def make_groups(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make groups for collectives; all ranks give the same ones, in the same order. Raises Lost."""
        try:
            for call in self.collectives.make(groups):
                self.settle(call)
        except RuntimeError as error:
            raise self.give_up(error) from None

    def begin_collective(self, kind: str, ranks: tuple[int, ...], part: Tensor, found: Tensor) -> Call:
        """Begin a collective of these ranks; see `CollectiveGroups`. Raises Lost."""
        if self.lost is not None:
            raise self.lost
        try:
            return self.collectives.begin(kind, ranks, part, found, self.patience)
        except RuntimeError as error:
            raise self.give_up(error) from None

    def lose(self, peer: int, error: Exception | str) -> Lost:
        """Find out which rank is lost, after an error with `peer`, and close the connections."""
        if self.lost is not None:  # a later error may be a consequence of the first
            return self.lost
        if (said := said_by(self.tcp_peers[peer])) is not None:
            return self._close(said)
        late, seconds = timed_out(error), self.patience.total_seconds()
        reason = f"did not answer for {seconds:g} s" if late else "is gone: its connection is closed"
        rank, why = blame(self.store, self.rank, peer, reason, late, self.timeout / 4)
        return self._close(Lost(rank, f"rank {rank} {why}"))

    def give_up(self, error: BaseException) -> Lost:
        """Take part in no more messages, after an error of this rank's own device or memory; the others hear of it."""
        if self.lost is not None:
            return self.lost
        why = f"cannot go on: {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # the store is gone
            self.store.compare_set("lost", "", f"{self.rank} {why}")
        return self._close(Lost(self.rank, f"rank {self.rank} {why}"))

    def _close(self, lost: Lost) -> Lost:
        """Close the connections for values, so that nobody waits for this rank."""
        self.lost = lost
        for tcp_peer in self.tcp_peers.values():
            tcp_peer.close(f"{lost.rank} {lost}")
        for local_peer in self.local_peers.values():  # now: those who see it read why
            local_peer.close()
        for groups in (*self.control, self.communicators, self.collectives):  # who waits in gloo hears nothing else
            if groups is not None:
                groups.abort()
        return lost

    # Small messages ---------------------------------------------------------------------------------------------------

    def tell(self, *peers: int, data: bytes) -> None:
        """Send bytes to ranks; those that are alive get them even if one is lost. Then raises Lost."""
        lost = None
        for do in (partial(self.begin_to_tell, data=data), self.told):
            for peer in peers:
                try:
                    do(peer)
                except Lost as error:
                    lost = error
        if lost is not None:
            raise lost

    def begin_to_tell(self, peer: int, data: bytes) -> None:
        """Send bytes, now or soon: what fits into a block of shared memory there, the rest by TCP. Raises Lost."""
        data = self.open.tag + data
        if peer in self.local_peers:
            local_peer, head = self.local_peers[peer], len(data).to_bytes(COUNT, "little")
            self.wait(peer, local_peer.out.may_write)
            local_peer.out.write(head + data[: BLOCK - COUNT])
            local_peer.ring()
            data = data[BLOCK - COUNT :]
            if not data:
                return
        try:
            self.tcp_peers[peer].write(data)
        except RuntimeError as error:
            raise self.lose(peer, error) from None

    def told(self, peer: int) -> None:
        """Wait until all that was told to a rank is sent. Raises Lost."""
        self.wait_apart(peer, self.tcp_peers[peer].sent)

    def hear(self, peer: int) -> bytes:
        """Receive the bytes that a rank sent by `tell`. Raises Lost, also if that rank is in another pipe."""
        tag, data = divided(self._heard(peer))
        if tag != self.open.tag:
            raise self._close(Lost(*self.open.elsewhere(peer, tag)))
        return data

    def _heard(self, peer: int) -> bytes:
        if peer not in self.local_peers:
            return self._apart(peer)
        shared = self.local_peers[peer].into
        number = shared.ask()
        self.wait(peer, lambda: shared.has(number))
        head = shared.read(number)
        length = int.from_bytes(head[:COUNT], "little")
        if length <= BLOCK - COUNT:
            return head[COUNT : COUNT + length]
        return head[COUNT:] + self._apart(peer)

    def _apart(self, peer: int) -> bytes:
        """The next letter by TCP."""
        tcp_peer = self.tcp_peers[peer]
        place = tcp_peer.next(LETTER)
        self.wait_apart(peer, lambda: place in tcp_peer.found)
        return bytes(tcp_peer.found.pop(place))

    def broadcast(self, value: Any = None, home: int = LEADER) -> Any:
        """Give all ranks a copy of the value of rank `home`. Raises Lost."""
        if self.rank == home:
            self.tell(*self.others, data=pickle.dumps(value))
            return value
        return pickle.loads(self.hear(home))

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks, in order, on all ranks. Raises Lost."""
        found = None
        if self.leads:
            found = [value, *(pickle.loads(self.hear(peer)) for peer in self.others)]
        else:
            self.tell(LEADER, data=pickle.dumps(value))
        return cast(list[Any], self.broadcast(found))
