"""A process group for tests with NCCL's rules, in plain Python over sockets.

- A call is put into the queue of its communicator and returns. The queue is worked off in order, one entry at a time.
- An entry ends when its messages have met: nothing is buffered, so a send ends only once the peer's queue has come to
  the receive. The calls between `_start_coalescing` and `_end_coalescing` are one entry, which ends as a whole.
- "lazy": each pair of ranks has a communicator of its own for unbatched calls, and all ranks share another one for
  batches and collectives. "eager": all calls use the communicator of all ranks, and all groups of a rank have one
  queue, as on a device that is too small for the calls of two communicators at once.
- A collective is one entry, and meets that of all other ranks. Another call in its place is an error.
- The first use of a pair in a communicator blocks the host until the peer comes; so does the first batch of a lazy
  group, until all ranks come.
- Element types that NCCL does not have are refused.
- `wait()` blocks until the entry has ended, `wait(timeout)` polls. The end of a peer is not noticed: entries that wait
  for it wait until `abort`.

    register()                                              # in each process
    group = dist.new_group(ranks, backend="lazy_rendezvous")
"""

from __future__ import annotations

import ctypes
import pickle
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .rendezvous_collectives import Collectives, Part

LAZY, EAGER = "lazy_rendezvous", "eager_rendezvous"
PAUSE = 0.0005  # seconds between two looks of a host that polls
BUFFERED = 1 << 14  # bytes that a connection holds
TYPES = {
    torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
}  # fmt: skip


class Call(NamedTuple):
    """One point-to-point call."""

    send: bool
    peer: int
    tensor: Tensor


class Entry(dist.Work):
    """An entry of a queue, as its caller sees it: `ended`, and perhaps with an `error`. `finish` runs at its end."""

    def __init__(
        self,
        communicator: Communicator,
        what: str,
        calls: Sequence[Call],
        finish: Sequence[Callable[[], object]] = (),
        result: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self.communicator, self.what, self.calls, self.finish = communicator, what, calls, finish
        self.ended, self.error = Event(), ""
        self.result, self.future = list(result), torch.futures.Future[Any]()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:  # type: ignore[override]
        if not timeout:  # 0 is how C++ says that there is none
            self.ended.wait()
        else:
            end = time.monotonic() + timeout.total_seconds()
            while not self.ended.is_set():
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"timed out after {timeout}: {self.what} with {sorted({c.peer for c in self.calls})}"
                    )
                time.sleep(PAUSE)
        if self.error:
            raise RuntimeError(self.error)
        return True


class Queue:
    """Entries, which a thread works off in order."""

    def __init__(self) -> None:
        self.entries = SimpleQueue[Entry | None]()
        Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        while (entry := self.entries.get()) is not None:
            try:
                entry.communicator.meet(entry)
            except OSError:  # a connection has ended, which NCCL does not notice
                entry.communicator.group.aborted.wait()
                entry.error = "the communicator was aborted"
            except (ValueError, RuntimeError) as error:
                entry.error = str(error)
            entry.ended.set()
            if entry.error:
                entry.future.set_exception(RuntimeError(entry.error))
            else:
                entry.future.set_result(entry.result)


@cache
def only_queue() -> Queue:
    """The queue of all eager groups of this process."""
    return Queue()


class Communicator:
    """A queue of entries, and a connection to each peer that has been used."""

    def __init__(self, group: RendezvousGroup, name: str) -> None:
        self.group, self.name = group, name
        self.queue = only_queue() if group.eager else Queue()
        self.peers: dict[int, socket.socket] = {}

    def connect(self, peer: int) -> None:
        """Connect to a peer, once. Blocks the host until the peer comes, too."""
        if peer in self.peers:
            return
        group, key = self.group, f"{self.name}/{min(self.group.own, peer)}/{max(self.group.own, peer)}"
        if group.own < peer:
            with socket.create_server(("127.0.0.1", 0)) as server:
                group.store.set(key, str(server.getsockname()[1]))
                server.settimeout(0.05)
                found = list[socket.socket]()

                def accepted() -> bool:
                    with suppress(TimeoutError):
                        found.append(server.accept()[0])
                    return bool(found)

                group.block(accepted, f"the first use of rank {peer}")
                self.peers[peer] = found[0]
        else:
            group.block(lambda: group.store.check([key]), f"the first use of rank {peer}")
            self.peers[peer] = socket.create_connection(("127.0.0.1", int(group.store.get(key))))
        self.peers[peer].settimeout(None)
        self.peers[peer].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, *what: Any) -> Entry:
        """Put an entry into the queue."""
        entry = Entry(self, *what)
        self.queue.entries.put(entry)
        return entry

    def meet(self, entry: Entry) -> None:
        """Wait until all peers have come to an entry with the other ends of its calls, then move the data."""
        by_peer: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        for send, peer, tensor in entry.calls:
            by_peer.setdefault(peer, ([], []))[0 if send else 1].append(tensor)
        for peer, (sends, receives) in by_peer.items():
            head = pickle.dumps([entry.what, *([x.nbytes for x in some] for some in (sends, receives))])
            self.peers[peer].sendall(struct.pack("<I", len(head)) + head)
        for peer, (sends, receives) in by_peer.items():
            length = struct.unpack("<I", read(self.peers[peer], 4))[0]
            theirs, ours = pickle.loads(read(self.peers[peer], length)), (sends, receives)
            expected = [entry.what, *([x.nbytes for x in some] for some in reversed(ours))]
            if theirs != expected:  # NCCL would wait for ever, or mix up messages
                raise ValueError(
                    f"{entry.what}: rank {self.group.own} sends {[x.nbytes for x in sends]} bytes to rank {peer} and "
                    f"receives {[x.nbytes for x in receives]}, while that, {theirs[0]}, sends {theirs[1]} and receives "
                    f"{theirs[2]}"
                )
        messages = [(peer, x) for peer, (sends, _) in by_peer.items() for x in sends]
        if sum(x.nbytes for _, x in messages) <= BUFFERED:
            self.send_all(messages)
            self.receive_all(by_peer)
        else:  # peers that send more than a connection holds at once must not wait for each other
            sending = Thread(target=self.send_all, args=(messages,))
            sending.start()
            self.receive_all(by_peer)
            sending.join()
        for finish in entry.finish:
            finish()

    def receive_all(self, by_peer: dict[int, tuple[list[Tensor], list[Tensor]]]) -> None:
        for peer, (_, receives) in by_peer.items():
            for tensor in receives:
                data = read(self.peers[peer], tensor.nbytes)
                if data:
                    tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def send_all(self, messages: list[tuple[int, Tensor]]) -> None:
        for peer, tensor in messages:
            with suppress(OSError):
                self.peers[peer].sendall(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))

    def close(self) -> None:
        for peer in self.peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        if not self.group.eager:
            self.queue.entries.put(None)


def checked(tensor: Tensor) -> Tensor:
    """The tensor, if NCCL takes it. Raises RuntimeError."""
    if tensor.dtype not in TYPES:
        raise RuntimeError(f"{tensor.dtype} is not a type that NCCL has")
    if not tensor.is_contiguous():
        raise RuntimeError("tensors must be contiguous")
    return tensor


def read(connection: socket.socket, count: int) -> bytes:
    """Exactly this many bytes. Raises OSError if the connection ends before."""
    found = bytearray()
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionError
        found += part
    return bytes(found)


class RendezvousGroup(Collectives):
    """The group, as one rank sees it. `batch`: the calls since `_start_coalescing`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, eager: bool) -> None:
        super().__init__(rank, size)
        self.store, self.own, self.count, self.limit, self.eager = store, rank, size, timeout, eager
        self.communicators: dict[str, Communicator] = {}
        self.aborted = Event()
        self.batch: list[Call] | None = None

    def getBackendName(self) -> str:
        return EAGER if self.eager else LAZY

    @property
    def group_name(self) -> str:
        """torch's is that of a backend inside the group, and this has none."""
        c10d: Any = dist.distributed_c10d
        return str(c10d._world.pg_names[self])

    @property
    def supports_coalescing(self) -> bool:
        return True

    def block(self, there: Callable[[], bool], what: str) -> None:
        """Block the host until this is true."""
        end = time.monotonic() + self.limit.total_seconds()
        while not there():
            if self.aborted.is_set():
                raise RuntimeError("the communicator was aborted")
            if time.monotonic() > end:
                raise RuntimeError(f"rank {self.own} timed out: {what} blocks the host, as that has not come")
            time.sleep(PAUSE)

    def communicator(self, name: str) -> Communicator:
        if name not in self.communicators:
            if name == "all":
                self.store.set(f"all/{self.own}", "")
                everyone = [f"all/{rank}" for rank in range(self.count)]
                self.block(lambda: self.store.check(everyone), "the first batch, of all ranks,")
            self.communicators[name] = Communicator(self, name)
        return self.communicators[name]

    def ready(self, calls: Sequence[Call], name: str) -> Communicator:
        """The communicator for these calls, connected to their peers."""
        if self.aborted.is_set():
            raise RuntimeError("the communicator was aborted")
        communicator = self.communicator("all" if self.eager else name)
        for peer in sorted({call.peer for call in calls}):
            communicator.connect(peer)
        return communicator

    def call(self, send: bool, tensors: list[Tensor], peer: int) -> Entry | None:
        (tensor,) = tensors
        made = Call(send, peer, checked(tensor))
        if self.batch is not None:
            self.batch.append(made)
            return None
        return self.ready([made], f"{min(self.own, peer)}-{max(self.own, peer)}").put("message", [made])

    def collective(self, what: str, parts: Sequence[Part], result: Sequence[Tensor] = ()) -> Entry:
        calls, finish = list[Call](), list[Callable[[], object]]()
        for part in parts:
            for send, tensors in ((True, part.give), (False, part.take)):
                calls += [
                    Call(send, peer, checked(x)) for peer, x in enumerate(tensors) if x is not None and peer != self.own
                ]
            given, taken = part.give[self.own], part.take[self.own]
            if given is not None and taken is not None:
                finish.append(partial(taken.copy_, given))
            finish.append(part.finish)
        return self.ready(calls, "all").put(what, calls, finish, result)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        return self.call(True, tensors, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Any:
        return self.call(False, tensors, peer)

    def _start_coalescing(self, device: Any = None) -> None:
        self.batch = []

    def _end_coalescing(self, device: Any = None) -> Any:
        calls, self.batch = self.batch or [], None
        return self.ready(calls, "all").put("messages", calls)

    def abort(self) -> None:
        self.aborted.set()
        for communicator in self.communicators.values():
            communicator.close()


def register(devices: Sequence[str] = ("cpu",)) -> None:
    """Make both modes known to torch.distributed, in this process, for tensors on such devices, whose memory the host
    can read."""
    for name, eager in ((LAZY, False), (EAGER, True)):
        if name not in dist.Backend.backend_list:

            def make(store: Any, rank: int, size: int, timeout: timedelta, eager: bool = eager) -> RendezvousGroup:
                return RendezvousGroup(store, rank, size, timeout, eager)

            dist.Backend.register_backend(name, make, devices=list(devices))
