"""The processes of a pipe: a rank for each device, and how they tell each other small things.

torch.distributed's collectives are of no use where one rank may be gone: its neighbours get an error, the others wait.
So everything is sent from one rank to another, and who agrees on something does so through the leader, rank 0:

    rank 1 ──▶ leader ──▶ rank 1        whoever is gone, the leader sees it at once, or its own end is seen by all
    rank 2 ──▶        ──▶ rank 2

Ranks on one machine exchange everything through shared memory (`same_machine.py`), which takes a third of the time.
Values that do not fit there use torch.distributed, as values between machines do.

A wait that ends in an error means that a rank is lost: it has ended, or stands still for longer than the timeout.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxpipe.engines.transports.message_format import Size, blank
from fxpipe.engines.transports.same_machine import LocalPeer, neighbours
from fxpipe.engines.transports.shared_memory import BLOCK, Slot
from fxpipe.errors import RankError

from .failure_attribution import blame

LEADER = 0
UP, DOWN = 0, 1  # lanes: to ranks with larger numbers, and to those with smaller ones
VALUES, SAID = 0, 1  # tags: the two may share a connection
COUNT = 8  # bytes of the length of small things, which stands before them


class Lost(Exception):
    """A rank is gone, or does not answer."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


@dataclass(eq=False)
class World:
    """The ranks of one pipe, as one of them sees it.

    - `group`: their ProcessGroup, for collectives.
    - `labels`: of the devices, by rank; `device`: this rank's own.
    - `lanes`: the process groups for values, to later stages and back.
    - `control`: the process group for everything else, from memory of the host.
    - `timeout`: seconds after which a rank that does not answer counts as lost.
    - `store`: where the first rank that notices a loss says so; `lost`: why no further step is possible, or None.
    - `listeners`: receives that this rank has begun, by the sender.
    - `local_peers`: the ranks on the same machine, which share memory with this one.
    - `steps`: how many have begun, the same on every rank.
    - `process`: the id of this rank's process; a fork of it cannot use the connections.
    """

    group: Any
    rank: int
    labels: tuple[str, ...]
    device: torch.device
    lanes: tuple[Any, Any]
    control: Any
    timeout: float
    store: Any
    lost: Lost | None = None
    limit: timedelta = field(init=False)
    listeners: dict[int, tuple[Tensor, Any]] = field(default_factory=dict)
    local_peers: dict[int, LocalPeer] = field(default_factory=dict)
    steps: int = 0
    process: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self.limit = timedelta(seconds=self.timeout)

    @property
    def label(self) -> str:
        return self.labels[self.rank]

    @property
    def others(self) -> Sequence[int]:
        return [rank for rank in range(len(self.labels)) if rank != self.rank]

    @property
    def leads(self) -> bool:
        return self.rank == LEADER

    # One message ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins, on every rank: the places for values are free again."""
        self.steps += 1
        for local_peer in self.local_peers.values():
            local_peer.out.begin(self.steps)
            local_peer.into.begin(self.steps)

    def slot(self, send: bool, peer: int, size: Size) -> Slot | None:
        """The place of the next value that goes to a rank or comes from it, where the two share memory; else, or if
        there is no place left, it has to be sent."""
        if peer not in self.local_peers or self.device.type != "cpu":
            return None
        local_peer = self.local_peers[peer]
        return (local_peer.out if send else local_peer.into).slot(size)

    def receive(self, peer: int, size: Size) -> Callable[[], Tensor]:
        """Begin to receive a value: what is returned gives its message, once it is there. Both raise Lost."""
        slot = self.slot(False, peer, size)
        if slot is not None:

            def left() -> Tensor:
                self.wait(peer, slot.there)
                return slot.tensor(size).clone()  # the next step writes there, and who knows who keeps the value

            return left
        buffer = blank(size, self.device)
        work = self.start(False, peer, buffer)

        def sent() -> Tensor:
            self.finish(work, peer)
            return buffer

        return sent

    def put(self, slot: Slot, peer: int) -> None:
        """A value is in its place."""
        slot.stamp()
        self.local_peers[peer].ring()

    def wait(self, peer: int, there: Callable[[], bool]) -> None:
        """Until a rank on the same machine has done something. Raises Lost."""
        try:
            self.local_peers[peer].wait(there, self.timeout if self.lost is None else 0.0)
        except RuntimeError as error:
            raise self.lose(peer, error) from None

    def start(self, send: bool, peer: int, tensor: Tensor, group: Any = None) -> Any:
        """Begin to send a tensor, or to receive into it. Raises Lost."""
        tag = VALUES if group is None else SAID
        if group is None:
            group = self.lanes[UP if (peer > self.rank) == send else DOWN]
        try:
            return group.send([tensor], peer, tag) if send else group.recv([tensor], peer, tag)
        except RuntimeError as error:
            raise self.lose(peer, error) from None

    def finish(self, work: Any, peer: int) -> None:
        """Until what was begun is done. Raises Lost."""
        try:
            work.wait(self.limit)
        except RuntimeError as error:
            raise self.lose(peer, error) from None

    def lose(self, peer: int, error: Exception) -> Lost:
        """A rank is lost: what others have said of it, or else what is seen here."""
        if self.lost is not None:  # what is seen later may follow from it
            return self.lost
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        reason = f"did not answer for {self.timeout:g} s" if late else "is gone: its connection is closed"
        rank, why = blame(self.store, self.rank, peer, reason, late, self.timeout / 4)
        self.lost = Lost(rank, f"rank {rank} {why}")
        for local_peer in self.local_peers.values():
            local_peer.close()
        return self.lost

    # Small things -----------------------------------------------------------------------------------------------------

    def tell(self, peer: int, data: bytes) -> None:
        """Send bytes: one message, and another if there are many of them."""
        for work, _ in self.begin_to_tell(peer, data):
            self.finish(work, peer)

    def begin_to_tell(self, peer: int, data: bytes) -> list[tuple[Any, Tensor]]:
        """The works of `tell`, and what is to be kept until they are done."""
        first, rest = data[: BLOCK - COUNT], data[BLOCK - COUNT :]
        head, parts = len(data).to_bytes(COUNT, "little") + first, [rest] if rest else []
        if peer in self.local_peers:
            local_peer = self.local_peers[peer]
            self.wait(peer, local_peer.out.may_write)
            local_peer.out.write(head)
            local_peer.ring()
        else:
            parts.insert(0, head.ljust(BLOCK, b"\0"))
        tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
        return [(self.start(True, peer, tensor, self.control), tensor) for tensor in tensors]

    def listen(self, *peers: int) -> None:
        """Begin to hear what these ranks say next, so that they need not wait until this rank is ready to. Raises
        Lost."""
        for peer in peers:
            if peer not in self.listeners and peer not in self.local_peers:
                buffer = torch.empty(BLOCK, dtype=torch.uint8)
                self.listeners[peer] = buffer, self.start(False, peer, buffer, self.control)

    def hear(self, peer: int) -> bytes:
        """Receive bytes."""
        head = self._letter(peer) if peer in self.local_peers else self._block(peer)
        length = int.from_bytes(head[:COUNT], "little")
        if length <= BLOCK - COUNT:
            return head[COUNT : COUNT + length]
        rest = torch.empty(length - (BLOCK - COUNT), dtype=torch.uint8)
        self.finish(self.start(False, peer, rest, self.control), peer)
        return head[COUNT:] + rest.numpy().tobytes()

    def _letter(self, peer: int) -> bytes:
        """What has come next from a rank on the same machine."""
        shared = self.local_peers[peer].into
        shared.letters += 1
        number = shared.letters
        self.wait(peer, lambda: shared.has(number))
        return shared.read(number)

    def _block(self, peer: int) -> bytes:
        """What has come next from a rank on another one."""
        self.listen(peer)
        buffer, work = self.listeners.pop(peer)
        self.finish(work, peer)
        return buffer.numpy().tobytes()

    def tell_all(self, data: bytes) -> None:
        """From one rank to all others; those who are there get it even if one is lost."""
        lost, begun = None, list[tuple[int, Any, Tensor]]()
        for peer in self.others:
            try:
                begun += [(peer, *one) for one in self.begin_to_tell(peer, data)]
            except Lost as error:
                lost = error
        for peer, work, _ in begun:
            try:
                self.finish(work, peer)
            except Lost as error:
                lost = error
        if lost is not None:
            raise lost

    def share(self, value: Any = None, home: int = LEADER) -> Any:
        """A rank's value, which others get a copy of."""
        if self.rank == home:
            self.tell_all(pickle.dumps(value))
            return value
        return pickle.loads(self.hear(home))

    def collect(self, value: Any) -> list[Any]:
        """The values of all ranks, to all of them."""
        if not self.leads:
            self.tell(LEADER, pickle.dumps(value))
            found: list[Any] = self.share()
            return found
        found = [value, *(pickle.loads(self.hear(peer)) for peer in self.others)]
        self.share(found)
        return found


# The door -------------------------------------------------------------------------------------------------------------


_worlds: dict[Any, World] = {}


def join(group: Any, device: torch.device, timeout: float) -> World:
    """The world of the ranks of `group`, with connections of its own, which all pipes on these ranks share. Raises
    RankError if one is lost meanwhile."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    key = (*ranks, device, timeout, id(dist.group.WORLD))
    if key in _worlds:
        return _worlds[key]
    # Backends by themselves: torch.distributed.new_group asks all ranks of the whole world to take part, or else (torch
    # 2.13) that all are in equally many groups, from which it makes the new one's name.
    c10d: Any = dist.distributed_c10d
    store = c10d.PrefixStore(f"fxpipe/{'-'.join(map(str, ranks))}/{timeout}", c10d._get_default_store())
    limit = timedelta(seconds=timeout)
    control = c10d.ProcessGroupGloo(c10d.PrefixStore("control", store), rank, len(ranks), limit)
    lanes = control, control
    if device.type == "cuda":
        # With NCCL what is sent to a rank waits behind what was begun with it before, so the two ways are two groups.
        up, down = (c10d.PrefixStore(way, store) for way in ("up", "down"))
        lanes = tuple(c10d.ProcessGroupNCCL(way, rank, len(ranks), limit) for way in (up, down))
    labels = tuple(f"{device.type}:{rank}" for rank in range(len(ranks)))
    made = World(group, rank, labels, device, lanes, control, timeout, store)
    try:
        made.local_peers = neighbours(rank, made.collect)
    except Lost as lost:
        raise RankError(str(lost)) from None
    _worlds[key] = made
    return made
