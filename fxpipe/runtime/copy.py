"""Copies between devices that autograd walks back: values forward, their gradients back, both on streams of their own.

    compute 0   F(0) F(1) F(2)                     B(2) B(1)          a copy waits for the task that made the value,
    stream 0,i     └x─┐└x─┐                     ┌gx─┘                   compute goes on meanwhile
    stream 1,i        └x┐                    ┌gx┘
    compute 1           F(0) F(1)       B(2)─┘

Three steps: the copy stream waits for compute (`wait`), the value goes over (`copy`), compute on the other device
waits for the copy (`wait`). They are separate functions because in backward the work between them is what should not
wait: the recomputation of a task starts while its gradient is still on the way.

Between CPU workers there is nothing to copy, and generated code does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .stream import Stream, current_stream, record_stream, use_stream, wait_stream


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
    """The tensors on `device`, copied on the two streams: `x = copy(streams[0, i], streams[1, i], device, x)`."""
    return Copy.apply(source, target, device, *tensors)  # type: ignore[no-untyped-call]


def wait(waiting: Stream, done: Stream, *tensors: Tensor) -> Any:
    """The tensors, usable on `waiting` once `done` has finished with them; in backward the other way round."""
    return Wait.apply(waiting, done, *tensors)  # type: ignore[no-untyped-call]


def move(
    source: Stream, target: Stream, device: torch.device, user: Stream, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The tensors on `device`, without autograd, copied on two streams, for use on a third. Memory that several streams
    touch is recorded on each but the one it was allocated on."""
    moved = []
    with use_stream(source), use_stream(target):
        for x in tensors:
            # A copy into CPU memory must have arrived before anyone reads it; for a GPU, streams see to that.
            y = x.to(device, non_blocking=device.type == "cuda")
            record_stream(x, source)
            record_stream(y, user)
            moved.append(y)
    return tuple(moved)
