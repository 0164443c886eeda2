"""Named streams, for copies that overlap with compute.

    streams[stage, i]     carries the copies of micro-batch i into and out of a stage, so that a copy waits for
                          nothing but the task that made the value

The CPU has none: None stands in for its stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from .accelerator import has_streams

Stream = torch.Stream | None


class Streams:
    """`streams[stage, i]`: made at its first use, kept as long as the pipe."""

    def __init__(self, devices: tuple[torch.device, ...]) -> None:
        self._devices = devices
        self._made: dict[tuple[int, int], Stream] = {}

    def __getitem__(self, key: tuple[int, int]) -> Stream:
        try:
            return self._made[key]
        except KeyError:  # two threads may come here at once, and must get the same stream
            return self._made.setdefault(key, new_stream(self._devices[key[0]]))


def new_stream(device: torch.device, priority: int = 0) -> Stream:
    """A stream. A GPU has 32 of each priority, which torch hands out in turn: two of one priority may be one stream."""
    return torch.Stream(device=device, priority=priority) if has_streams(device) else None


def current_stream(device: torch.device) -> Stream:
    return torch.accelerator.current_stream(device) if has_streams(device) else None


def use_stream(stream: Stream) -> AbstractContextManager[object]:
    """A context in which the stream's device is the current one, and its work goes to the stream."""
    return nullcontext() if stream is None else _used(stream)


@contextmanager
def _used(stream: torch.Stream) -> Iterator[None]:
    # A torch.Stream is a context itself, but keeps what was current before in itself: only one thread could enter it.
    device, before = torch.accelerator.current_device_index(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def wait_stream(waiting: Stream, done: Stream) -> None:
    """Later work on `waiting` starts after the present work on `done`. Both are streams of one device, or None for the
    CPU, which works in the order of the program. The host does not wait."""
    if done is not None:
        assert waiting is not None
        waiting.wait_stream(done)


def record_stream(tensor: Tensor, stream: Stream) -> None:
    """Keep the tensor's memory from being reused before the present work on `stream` is done."""
    if stream is not None and has_streams(tensor.device):
        tensor.record_stream(stream)
