"""Small messages between ranks: each two of them have a TCP connection, which they read and write themselves. Where
ranks share memory, it carries what does not fit there, small values and the ends of long letters, and notices of ranks
that give up.

gloo announces each message to its receiver, and a thread of its own hands it over: for a small message that takes more
time than to send it. So gloo sends the large values only, while ranks compute.

    | length and kind, 16 bytes | data | length and kind | data ...

- A value is a message of a step; a letter is one of `World.tell`, of any length. Both sides number what goes this way,
  each kind in the order of the program. So a letter for which Ctrl-C has ended the wait is not taken for the next one.
- Closed: the sender has given up, and says why. Nothing that is needed will come.
- Left: the sender has closed one of the pipes that share the connection.

A rank reads when it waits. It spins first, as in shared memory, and then sleeps until something comes or the other
process has ended. A send never waits: what the system does not take at once is sent by a thread, which lives until all
is sent.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from secrets import token_bytes
from threading import Lock, Thread
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor

from .message_format import Size, length, nbytes

SMALL = 2**18  # the most bytes of a value; for those of some MiB gloo takes less time
VALUE, LETTER, CLOSED, LEFT = range(4)
HEAD = 16  # bytes before the data: those of complex numbers must lie at a multiple of 16
CHUNK = 2**18  # bytes read at once
AGAIN = 0.005  # seconds until a rank that waits until all is sent looks again
TOKEN, STRANGER = 16, 5.0  # bytes that prove that a process is one of the ranks, and seconds for it to send them
GONE = "the other rank has closed its connection"
TORN = "an interrupt has come in the middle of a message to or from the other rank"


@dataclass(frozen=True, slots=True)
class Frame:
    """A value that is to be sent."""

    data: bytearray

    def tensor(self, size: Size) -> Tensor:
        """Its message buffer."""
        return torch.frombuffer(self.data, dtype=size[0], count=length(size), offset=HEAD)


@dataclass(eq=False, slots=True)
class TcpPeer:
    """Another rank. Raises RuntimeError where it is gone.

    - `found`: what has come and is not taken, by kind and number.
    - `asked`, `came`: how many of each kind were asked for, and have come.
    - `closed`: what the other rank said when it gave up; `left`: the numbers of the pipes that it has closed, and why.
    - `rest`: what the system has not taken yet; `lock`: for it, and to send; `error`: why the thread could not.
    - `room`: where the system puts what has come; `part`: what of it is not whole yet.
    - `torn`: whether Ctrl-C has left a message half sent or half read.
    """

    connection: socket.socket
    spin: float
    found: dict[tuple[int, int], bytearray] = field(default_factory=dict)
    asked: list[int] = field(default_factory=lambda: [0, 0])
    came: list[int] = field(default_factory=lambda: [0, 0])
    closed: str | None = None
    left: dict[int, str] = field(default_factory=dict)
    rest: deque[memoryview] = field(default_factory=deque)
    lock: Any = field(default_factory=Lock)
    error: OSError | None = None
    room: memoryview = field(default_factory=lambda: memoryview(bytearray(CHUNK)))
    part: bytearray = field(default_factory=bytearray)
    torn: bool = False
    poll: Any = field(default_factory=select.poll)

    def __post_init__(self) -> None:
        self.connection.setblocking(False)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.poll.register(self.connection, select.POLLIN)

    # To send ----------------------------------------------------------------------------------------------------------

    @staticmethod
    def fits(size: Size) -> bool:
        """Whether values of this type and shape go this way, in both directions."""
        return nbytes(size) <= SMALL

    def frame(self, size: Size) -> Frame | None:
        """The next value to send; None if it goes another way."""
        if not self.fits(size):
            return None
        count = nbytes(size)
        data = bytearray(HEAD + count)
        data[:HEAD] = head(VALUE, count)
        return Frame(data)

    def write(self, letter: bytes) -> None:
        self.send(head(LETTER, len(letter)) + letter)

    def send(self, data: bytes | bytearray) -> None:
        """Send all of it, now or soon."""
        with self.lock:
            if self.torn or self.error is not None:
                raise RuntimeError(TORN if self.torn else f"{GONE}: {self.error}")
            self.torn = True
            begun = bool(self.rest)
            self.rest.append(memoryview(data))
            if not begun:
                self._drain()
                if self.rest:
                    Thread(target=self._send_rest, name="fxpipe sends", daemon=True).start()
            self.torn = False
            if self.error is not None:
                raise RuntimeError(f"{GONE}: {self.error}")

    def _drain(self) -> None:
        """Send what the system takes."""
        while self.rest:
            try:
                sent = self.connection.send(self.rest[0])
            except BlockingIOError:
                return
            except OSError as error:
                self.error = error
                self.rest.clear()
                return
            if sent < len(self.rest[0]):
                self.rest[0] = self.rest[0][sent:]
            else:
                self.rest.popleft()

    def _send_rest(self) -> None:
        poll = select.poll()
        poll.register(self.connection, select.POLLOUT)
        while True:
            poll.poll()
            with self.lock:
                self._drain()
                if not self.rest:
                    return

    def sent(self) -> bool:
        """Whether the system has all that was sent, and will send it even if this process ends."""
        return not self.rest

    def close(self, why: str) -> None:
        """Tell the other rank that nothing more will be sent."""
        try:
            self.send(head(CLOSED, len(why.encode())) + why.encode())
        except RuntimeError:
            if self.torn:  # in the middle of a message there is no other way
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)

    def leave(self, pipe: int, why: str) -> None:
        """Tell the other rank that this one has closed a pipe, and why if that was an error."""
        with suppress(RuntimeError):
            data = f"{pipe} {why}".encode()
            self.send(head(LEFT, len(data)) + data)

    # To receive -------------------------------------------------------------------------------------------------------

    def next(self, kind: int) -> tuple[int, int]:
        """Ask for the next value or letter: its place in `found`."""
        self.asked[kind] += 1
        return kind, self.asked[kind]

    def wait(self, there: Callable[[], bool], limit: float) -> None:
        """Wait until `there()` is true. Raises RuntimeError if the other rank has ended or closed the connection, or
        after `limit` seconds."""
        if there():
            return
        spins, end = perf_counter() + self.spin, monotonic() + limit
        while not there():
            if self.read():
                continue
            if self.closed is not None:
                raise RuntimeError(GONE)
            if perf_counter() < spins:
                os.sched_yield()
                continue
            left = end - monotonic()
            if left <= 0:
                raise RuntimeError("timed out")
            self.poll.poll(1 + 1e3 * (min(left, AGAIN) if self.rest else left))

    def read(self) -> bool:
        """Read what has come; whether anything has. Raises RuntimeError if the other rank has ended."""
        if self.torn:
            raise RuntimeError(TORN)
        self.torn = True
        try:
            count = self.connection.recv_into(self.room)
        except OSError as error:
            self.torn = False
            if isinstance(error, BlockingIOError):
                return False
            raise RuntimeError(f"{GONE}: {error}") from None
        self.part += self.room[:count]
        self._take()
        self.torn = False
        if not count:
            raise RuntimeError(f"{GONE}: it has ended")
        return True

    def _take(self) -> None:
        """Take what has come whole out of `part`."""
        part, at = self.part, 0
        while len(part) - at >= HEAD:
            count, kind = divmod(int.from_bytes(part[at : at + HEAD], "little"), 4)
            if len(part) - at - HEAD < count:
                break
            data = part[at + HEAD : at + HEAD + count]
            if kind == CLOSED:
                self.closed = data.decode()
            elif kind == LEFT:
                number, _, why = data.decode().partition(" ")
                self.left[int(number)] = why
            else:
                self.came[kind] += 1
                self.found[kind, self.came[kind]] = data
            at += HEAD + count
        del part[:at]


def head(kind: int, count: int) -> bytes:
    return (count * 4 + kind).to_bytes(HEAD, "little")


# To connect -----------------------------------------------------------------------------------------------------------


def connect(store: Any, rank: int, size: int, limit: timedelta, spin: float) -> dict[int, TcpPeer]:
    """The connections to all other ranks, which make this call too; they find each other through the store of
    torch.distributed. `spin`: the seconds for which a rank spins, where no other one needs its core. Raises OSError,
    and RuntimeError if the store does not answer."""
    seconds, token, found = limit.total_seconds(), token_bytes(TOKEN), dict[int, socket.socket]()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with serve(size) as server:
        host, port = server.getsockname()[:2]
        store.set(f"tcp/{rank}", f"{socket.gethostname()} {host} {port} {token.hex()}")
        offers = [store.get(f"tcp/{other}").decode().split() for other in range(size)]
        together = [offer[0] for offer in offers].count(offers[rank][0])
        for peer in range(rank):
            _, host, port, its = offers[peer]
            try:
                found[peer] = socket.create_connection((host, int(port)), seconds)
                found[peer].sendall(bytes.fromhex(its) + rank.to_bytes(4, "little"))
            except OSError as error:
                raise OSError(f"rank {peer} at {host}, port {port}: {error}") from None
        server.settimeout(seconds)
        while len(found) < size - 1:
            made, _ = server.accept()
            made.settimeout(STRANGER)
            try:
                said = made.recv(TOKEN + 4, socket.MSG_WAITALL)
            except OSError:
                said = b""
            if said[:TOKEN] == token:
                found[int.from_bytes(said[TOKEN:], "little")] = made
            else:
                made.close()
    return {peer: TcpPeer(made, spin if together <= cores else 0.0) for peer, made in found.items()}


def serve(size: int) -> socket.socket:
    """A server at the address that gloo would take: that of the network card in `GLOO_SOCKET_IFNAME`, else the one of
    this host's name, else the loopback one. Raises OSError if there is no such card."""
    addresses = [(socket.AF_INET, "127.0.0.1")]
    if card := os.environ.get("GLOO_SOCKET_IFNAME"):
        addresses = [(socket.AF_INET, address_of(card))]
    else:
        with suppress(OSError):
            known = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            addresses = [(family, str(address[0])) for family, _, _, _, address in known] + addresses
    for family, address in addresses[:-1]:
        with suppress(OSError):  # the name may have addresses that this host does not have
            return socket.create_server((address, 0), family=family, backlog=size)
    family, address = addresses[-1]
    return socket.create_server((address, 0), family=family, backlog=size)


def address_of(card: str) -> str:
    """The IPv4 address of a network card. Raises OSError if it has none."""
    import fcntl  # not on all systems
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            found = fcntl.ioctl(asked, 0x8915, struct.pack("256s", card[:15].encode()))  # SIOCGIFADDR of Linux
        except OSError as error:
            raise OSError(f"the network card {card!r} of GLOO_SOCKET_IFNAME has no IPv4 address: {error}") from None
    return socket.inet_ntoa(found[20:24])
