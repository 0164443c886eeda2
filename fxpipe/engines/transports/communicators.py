"""Values between ranks over process groups that queue their calls and do not buffer, such as NCCL's.

Such a group runs its calls one after the other, on the device. A send ends when the other rank has come to the matching
receive, and the other way round. So all ranks issue their calls in one order (`ir/program/transfers.py`), even if they
are few:

- Each direction has a group of its own, up (to ranks with larger numbers) and down, but the order holds over both.
- What goes together is one batch. Even a single call is a batch: unbatched calls of a pair may be in another queue than
  its batches, and would not meet them.
- The first use of a group or pair blocks the host until the others come, so all are used once when ranks join.
- Values go as bytes, as NCCL does not have all element types.

A device that waits for a lost rank waits for ever, and so does a host that waits for this device. So hosts only look
whether a call has ended, and at their TCP connections meanwhile. `abort` ends the calls of a device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from fxpipe.torch_internals.process_groups import backend_group, batch, gloo_pair

PAUSE = 2e-4  # seconds between two looks at a call on an accelerator
SHORT = timedelta(seconds=0.05)  # between two looks at the other ranks
# NCCL's watchdog ends the process when a call takes too long or fails. Here ranks find that out by themselves, say
# which rank is lost, and may save what they have.
SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


@dataclass(eq=False, slots=True)
class Call:
    """A send or receive, or a collective. `work`: its batch, once it is issued; None if there are no bytes to move.
    `ranks`: all that take part in a collective; `part`: what this one gives, which has to live as long."""

    send: bool
    peer: int
    tensor: Tensor
    work: Any = None
    ranks: tuple[int, ...] = ()
    part: Tensor | None = None


class Communicators:
    """The groups of one rank, for `up` and for `down`."""

    def __init__(self, backend: str, store: Any, rank: int, size: int, device: torch.device, limit: timedelta) -> None:
        self.rank, self.size, self.device, self.limit = rank, size, device, limit
        with settings():
            self.groups = tuple(
                backend_group(backend, PrefixStore(way, store), rank, size, limit) for way in ("up", "down")
            )

    def exchange(self, calls: Sequence[Call]) -> None:
        """Issue calls that go together. Raises RuntimeError."""
        for group, up in zip(self.groups, (True, False), strict=True):
            own = [call for call in calls if (call.peer > self.rank) == (call.send == up) and call.tensor.numel()]
            if own:
                with batch(group) as works:
                    for call in own:
                        (group.send if call.send else group.recv)([call.tensor], call.peer, 0)
                for call in own:
                    [call.work] = works

    def touch(self) -> list[Call]:
        """Use each pair once in each group; returns the calls to wait for. It is one batch of all ranks in a group: the
        first batch of a group blocks the host until all ranks come, and then each pair until both do."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        empty = partial(torch.zeros, 1, dtype=torch.uint8, device=self.device)
        calls = [Call(send, peer, empty()) for peer in peers for send in (False, True)]
        self.exchange(calls)
        return calls

    def abort(self) -> None:
        """End all calls with an error. The groups cannot be used again."""
        for group in self.groups:
            group.abort()


def backends(group: Any) -> dict[str, str]:
    """The backend of a group for each type of device."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def each_way(store: Any, rank: int, size: int, limit: timedelta) -> tuple[Any, Any]:
    """Two process groups of gloo, so that a connection has values in one direction only. While a thread sends, gloo's
    own thread cannot read what arrives on the same connection: it spins, and may take the processor from the sender."""
    return gloo_pair((PrefixStore("down", store), PrefixStore("up", store)), rank, size, limit)


def ended(work: Any, on_host: bool) -> bool:
    """Whether a call has ended, after a look at it, or a short wait for a call between hosts."""
    if work.is_completed():
        return True
    if on_host:
        with suppress(RuntimeError):
            work.wait(SHORT)
    else:
        sleep(PAUSE)
    return bool(work.is_completed())


@contextmanager
def settings() -> Iterator[None]:
    """A context in which new groups of NCCL leave errors to us."""
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
