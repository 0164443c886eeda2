"""What torch.compile knows of the trace that it takes in this thread: where it is, and what its guards look at."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from traceback import walk_tb
from typing import Any, cast

from torch import _guards

from fxpipe.torch_internals.capability import Capability, if_there

from .patched import patched

TRACE_CONTEXT = Capability(
    what="where a trace is, and what its guards look at",
    names=(
        "torch._guards.TracingContext.set_current_loc",
        "torch._guards.tracing",
        "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx",
        "torch._dynamo.symbolic_convert.InstructionTranslatorBase",
    ),
    since="2.1",
    without="nothing is captured: it would not be known when a trace is outdated",
)
OP_RUNS = Capability(
    what="the function that runs an op of a trace on tensors without memory",
    names=("torch._dynamo.utils.run_node",),
    since="2.1",
    without="all ops of a trace run a second time",
)
GUARD_TIMES = Capability(
    what="the function that measures how long guards take",
    names=("torch._dynamo.guards.profile_guard_manager",),
    since="2.6",
    without="a capture takes up to a fifth longer",
)


def in_a_trace(mode: Any) -> AbstractContextManager[Any]:
    """A context in which ops run as in a trace with this mode of tensors without memory."""
    return _guards.tracing(_guards.TracingContext(mode))


def say_where(file: str, line: int) -> None:
    """Let the next guards be of this line of the user's."""
    _guards.TracingContext.set_current_loc(file, line, "forward")


def guarded() -> Callable[[], list[Any]]:
    """A function that returns the objects that the guards of the current trace look at; they are known when the trace
    is over. It can be called once: then it is empty."""
    guards = list(_guards.TracingContext.get().guards_context.dynamo_guards)

    def objects() -> list[Any]:
        seen = [guard.obj_weakref() for guard in guards if isinstance(guard.obj_weakref, weakref.ref)]
        guards.clear()
        return seen

    return objects


def translator() -> Any:
    """What translates the code of the function that is being traced."""
    from torch._dynamo import symbolic_convert

    return symbolic_convert.InstructionTranslator.current_tx()


def translator_in(error: BaseException) -> Any:
    """The innermost translator that an error of a trace has left; None if there is none. It is only in the frames of
    the traceback, which Dynamo removes later."""
    from torch._dynamo import symbolic_convert

    found, one = None, cast(BaseException | None, error)
    while one is not None:
        for frame, _ in walk_tb(one.__traceback__):
            reader = frame.f_locals.get("self")
            if isinstance(reader, symbolic_convert.InstructionTranslatorBase) and _is_inside(reader, found):
                found = reader
        one = one.__cause__  # an error that has gone through a `with` of the model's begins there
    return found


def _is_inside(one: Any, other: Any) -> bool:
    """Whether a translator reads a function that another one, or what that one calls, has called."""
    while one is not None and one is not other:
        one = one.parent
    return one is other


@if_there(OP_RUNS)
@contextmanager
def op_runs(around: Callable[..., Any]) -> Iterator[None]:
    """A context in which `around(run, ...)` is called for each run of an op of a trace, `run(...)`: its arguments are
    the tracer, the node, the node's arguments, and the module that is called."""
    from torch._dynamo import utils

    with patched(utils, run_node=partial(around, utils.run_node)):
        yield


@if_there(GUARD_TIMES)
def untimed_guards() -> AbstractContextManager[Any]:
    """A context in which guards are not measured. To say in a log how long they take, torch.compile empties the
    processor's cache: a fifth of a small capture."""
    from torch._dynamo import guards

    return patched(guards, profile_guard_manager=lambda *_: 0.0)
