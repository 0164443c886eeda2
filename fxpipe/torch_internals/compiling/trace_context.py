"""What torch.compile knows of the trace that it takes in this thread: where it is, and what its guards look at."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fxpipe.torch_internals.capability import Capability

TRACE_CONTEXT = Capability(
    what="where a trace is, and what its guards look at",
    names=("torch._guards.TracingContext.set_current_loc", "torch._guards.tracing"),
    since="2.1",
    without="nothing is captured: it would not be known when a trace is outdated",
)


def in_a_trace(mode: Any) -> AbstractContextManager[Any]:
    """A context in which ops run as in a trace with this mode of tensors without memory."""
    return torch._guards.tracing(torch._guards.TracingContext(mode))


def say_where(file: str, line: int) -> None:
    """Let the next guards be of this line of the user's."""
    torch._guards.TracingContext.set_current_loc(file, line, "forward")


def guarded() -> Callable[[], list[Any]]:
    """A function that returns the objects that the guards of the current trace look at; they are known when the trace
    is over. It can be called once: then it is empty."""
    guards = list(torch._guards.TracingContext.get().guards_context.dynamo_guards)

    def objects() -> list[Any]:
        seen = [guard.obj_weakref() for guard in guards if isinstance(guard.obj_weakref, weakref.ref)]
        guards.clear()
        return seen

    return objects
