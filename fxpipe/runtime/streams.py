"""Named streams, for copies that overlap with compute.

    streams[stage, i]     carries the copies of micro-batch i into and out of a stage, so that a copy waits for
                          nothing but the task that made the value

The CPU has none: None stands in for its stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

Stream = torch.cuda.Stream | None


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


def new_stream(device: torch.device) -> Stream:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> Stream:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def use_stream(stream: Stream) -> AbstractContextManager[object]:
    """A context in which GPU work goes to the stream, on its device."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def wait_stream(waiting: Stream, done: Stream) -> None:
    """Later work on `waiting` starts after the present work on `done`. If `waiting` is the CPU (None), this call
    blocks."""
    if done is None:
        return  # the CPU works in the order of the program: its work is done
    if waiting is None:
        done.synchronize()
    else:
        waiting.wait_stream(done)


def record_stream(tensor: Tensor, stream: Stream) -> None:
    """Keep the tensor's memory from being reused before the present work on `stream` is done."""
    if stream is not None and tensor.is_cuda:
        tensor.record_stream(stream)
