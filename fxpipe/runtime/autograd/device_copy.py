"""Differentiable copies between devices: values forward, gradients backward, both on copy streams.

    compute 0   F(0) F(1) F(2)                     B(2) B(1)          a copy waits for the task that made the value,
    stream 0,i     └x─┐└x─┐                     ┌gx─┘                   compute goes on meanwhile
    stream 1,i        └x┐                    ┌gx┘
    compute 1           F(0) F(1)       B(2)─┘

    forward     stream 0,i waits for compute 0 ─▶ copy ─▶ wait: compute 1 waits for stream 1,i
    backward    leave: compute 0 waits for stream 0,i ◀─ copy ◀─ wait: stream 1,i waits for compute 1

In backward each step is a function of its own, because autograd's thread for the device concerned must run it, between
that device's tasks: if the copy itself made compute 0 wait, it would do so in the middle of B(2). A value may also have
users on its own device: their gradients and the copied one are added up after the wait of `Leave`.

Between CPU workers nothing is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fxpipe.runtime.accelerator import has_streams
from fxpipe.runtime.streams import Stream, current_stream, record_stream, use_stream, wait_stream


class Leave(Function):
    """Aliases to be copied to another device. In backward, compute waits for their copied gradients."""

    @staticmethod
    def forward(ctx: Any, compute: Stream, source: Stream, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.route = compute, source
        return tuple([x.detach() for x in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wait_stream(*ctx.route)
        return (None, None, *grads)


class Copy(Function):
    @staticmethod
    def forward(
        ctx: Any, source: Stream, target: Stream, device: torch.device, *tensors: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        home = tensors[0].device
        ctx.way_back = target, source, home, current_stream(home)
        moved = move(source, target, device, current_stream(device), tensors)
        return moved[0] if len(moved) == 1 else moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        source, target, home, user = ctx.way_back
        there = tuple([grad for grad in grads if grad is not None])
        moved = iter(move(source, target, home, user, there))
        return (None, None, None, *[None if grad is None else next(moved) for grad in grads])


class Wait(Function):
    @staticmethod
    def forward(ctx: Any, waiting: Stream, done: Stream, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.route = waiting, done
        wait_stream(waiting, done)
        outputs = tuple([x.detach() for x in tensors])
        return outputs[0] if len(outputs) == 1 else outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        waiting, done = ctx.route
        wait_stream(done, waiting)
        return (None, None, *grads)


def copy(source: Stream, target: Stream, device: torch.device, *tensors: Tensor) -> Any:
    """The tensors on `device`, copied on the two streams: `x = copy(streams[0, i], streams[1, i], device, x)`.

    All tensors are on one device, and `source` must already wait for the task that made them. With `source` None they
    are inputs from the caller, and are returned as they are if they are on `device` already.
    """
    home = tensors[0].device
    if source is not None:
        tensors = Leave.apply(current_stream(home), source, *tensors)  # type: ignore[no-untyped-call]
    elif home == device:
        return tensors[0] if len(tensors) == 1 else tensors
    else:
        source = current_stream(home)
    return Copy.apply(source, target, device, *tensors)  # type: ignore[no-untyped-call]


def wait(waiting: Stream, done: Stream, *tensors: Tensor) -> Any:
    """The tensors, to be used on `waiting`, which waits for `done`; in backward `done` waits for `waiting`."""
    return Wait.apply(waiting, done, *tensors)  # type: ignore[no-untyped-call]


def move(
    source: Stream, target: Stream, device: torch.device, user: Stream, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The tensors on `device`, without autograd, copied on two streams, for use on stream `user`. Memory that several
    streams use is recorded on each except the one that it was allocated on."""
    moved = []
    with use_stream(source), use_stream(target):
        for x in tensors:
            y = x.to(device, non_blocking=may_run_on(x, device))
            record_stream(x, source)
            record_stream(y, user)
            moved.append(y)
    return tuple(moved)


def may_run_on(x: Tensor, device: torch.device) -> bool:
    """Whether the copy may be asynchronous. A copy to the CPU may not: its contents could be read too early. A copy
    from pinned memory may not: the device reads it later, and the caller may have put the next batch there by then.
    From other CPU memory the driver has taken a copy before it returns."""
    return has_streams(device) and (has_streams(x.device) or not x.is_pinned())
