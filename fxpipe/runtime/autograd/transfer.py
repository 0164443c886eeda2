"""Transfers of tensors from one worker to another, while both go on computing.

    compute 0    F(0)  F(1)  F(2)            a copy waits for the task that made the value and for nothing else; it
    stream 0,i      └x──┐                    runs on the two copy streams of the micro-batch. The receiver waits for
    stream 1,i          └x──┐                the stream, not for the other worker
    compute 1               F(0)  F(1)

A copy to the CPU blocks, so the worker that needs the value makes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fxpipe.runtime.streams import Stream, current_stream, use_stream, wait_stream

from .device_copy import move


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that must not be used before `stream` is done with it, or that is still on an accelerator and goes to
    the CPU. `grad`: whether the received leaf needs a gradient."""

    tensor: Tensor
    stream: Stream
    device: torch.device
    grad: bool


def pack(x: Tensor, source: Stream, target: Stream, device: torch.device, user: Stream, grad: bool) -> Transfer:
    """Start the copy of a tensor to `device`, on two copy streams, for use on stream `user`. It was made on the current
    stream of its own device."""
    here = current_stream(x.device)
    if device.type == "cpu":
        # The transfer keeps the tensor until the copy that `unpack` makes, which blocks, so its memory needs no more.
        wait_stream(source, here)
        return Transfer(x, source, device, grad)
    if source is not None:
        wait_stream(source, here)
    return Transfer(move(source or here, target, device, user, (x,))[0], target, device, grad)


def unpack(transfer: Transfer, user: Stream) -> Tensor:
    """The tensor on its device, to be used on stream `user`."""
    if transfer.device.type == "cpu":
        with use_stream(transfer.stream):
            x = transfer.tensor.to(transfer.device)
    else:
        wait_stream(user, transfer.stream)
        x = transfer.tensor
    return x.detach().requires_grad_() if transfer.grad else x
