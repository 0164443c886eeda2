"""What torch.compile has made of a function: for each kind of call the code, and the guards that say which calls it is
right for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

from fxpipe.torch_internals.capability import Capability

COMPILED_CODE = Capability(
    what="the code that torch.compile has made of a function, with its guards",
    names=(
        "torch._C._dynamo.eval_frame._debug_get_cache_entry_list",
        "torch._C._dynamo.eval_frame.reset_code",
        "torch._dynamo.convert_frame.compile_lock",
        "torch._dynamo.eval_frame._stance.stance",
        "torch._dynamo.guards.DeletedGuardManagerWrapper",
    ),
    since="2.13",
    without="nothing is captured: it would not be known which layers and calls are alike",
)
SWITCHED_OFF = (
    "torch.compile is switched off, which reads the model for fxpipe: leave out TORCHDYNAMO_DISABLE and "
    "torch.compiler.set_stance('force_eager')"
)


@dataclass(frozen=True, eq=False)
class CompiledCode:
    """The code for a kind of call, which `run` runs without a look at the guards; and what they look at."""

    run: FunctionType
    guards: Any
    named: dict[str, Any]

    def holds(self) -> bool:
        """Whether the code is right for this call as it is now; if torch.compile has dropped it, it never is."""
        gone = _dynamo()[1].DeletedGuardManagerWrapper
        return not isinstance(self.guards, gone) and bool(self.guards.check(self.named))


def compiled_for(function: FunctionType, given: tuple[Any, ...]) -> CompiledCode | None:
    """What has been compiled for such a call. torch.compile finds it, too, but first sets all of its own state, and
    restores it afterwards, which takes as long as many small ops."""
    named = dict(zip(function.__code__.co_varnames, given, strict=False))
    entries: list[Any] = frames()._debug_get_cache_entry_list(function.__code__)
    for entry in entries:
        found = CompiledCode(FunctionType(entry.code, function.__globals__), entry.guard_manager, named)
        if found.holds():
            return found
    return None


def forget_with(owner: object, function: Callable[..., Any]) -> None:
    """Forget what has been compiled of the function when `owner` goes: torch's table from compiled to original code
    keeps both alive, and with them all that they refer to."""
    weakref.finalize(owner, frames().reset_code, function.__code__).atexit = False


def one_at_a_time() -> AbstractContextManager[Any]:
    """A context in which no other thread compiles, as settings of the compiler are those of the whole process."""
    from torch._dynamo import convert_frame

    return convert_frame.compile_lock


def is_switched_off() -> bool:
    """Whether torch.compile runs functions as they are."""
    return stance() == "force_eager"


def stance() -> str:
    """What torch.compile is told to do, in torch's word."""
    return str(_dynamo()[0]._stance.stance)


# Imported once, as calls ask for them, and late, as it takes more than a second.


@cache
def frames() -> Any:
    """The part of torch.compile that is in C++."""
    from torch._C._dynamo import eval_frame

    return eval_frame


@cache
def _dynamo() -> tuple[Any, Any]:
    from torch._dynamo import eval_frame, guards

    return eval_frame, guards
