"""Ranges in torch's profiler, so that a step in a profile reads like its schedule.

    F2.5           the forward of stage 2 for micro-batch 5; B is its backward, I and W are halves of it, R recomputes
    recv 2.5 x     what the stage waits for, and takes; recv 2.5 dy is a gradient
    send 2.5 y     what it sends

Without a profiler there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.profiler import record_function

from fxpipe.torch_internals.op_modes import is_profiled

from .step import Step, wrap
from .step_contract import ACTIONS

MESSAGES = {"receive": "recv", "send": "send", "receive_gradient": "recv", "send_gradient": "send"}


def show_ranges(m: Step) -> None:
    """Let each action and message of a step be a range, if a profiler records."""
    if not is_profiled():
        return
    actions = {name: partial(_action, kind) for name, kind in ACTIONS.items()}
    wrap(m, actions | {name: partial(_message, kind, "d" * ("gradient" in name)) for name, kind in MESSAGES.items()})


def _action(kind: str, m: Step, run: Callable[..., Any], j: int, i: int, *args: Any) -> Any:
    with record_function(f"{kind}{j}.{i}"):
        return run(m, j, i, *args)


def _message(kind: str, of: str, m: Step, run: Callable[..., Any], j: int, i: int, *what: Any, **ends: int) -> Any:
    names = [of + name for name in what if isinstance(name, str)]
    with record_function(f"{kind} {j}.{i} {' '.join(names)}"):
        return run(m, j, i, *what, **ends)
