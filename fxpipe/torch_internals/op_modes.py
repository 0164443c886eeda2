"""Modes that see every op that torch runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

from .capability import Capability

OP_MODES = Capability(
    what="a mode that sees every op",
    names=("torch.utils._python_dispatch.TorchDispatchMode",),
    since="1.13",
    without="fxpipe does not start: torch's own fake tensors stand on it, so every version has it",
    needed=True,
)
ACTIVE_MODES = Capability(
    what="how many modes see the ops and functions of this thread",
    names=("torch._C._len_torch_dispatch_stack", "torch._C._len_torch_function_stack"),
    since="2.0",
    without="compiled stages are called through torch.compile's own checks, which takes longer",
)
MODE_STACKS = Capability(
    what="the modes of this thread, and a context without them",
    names=(
        "torch.overrides._get_current_function_mode_stack",
        "torch.utils._device.DeviceContext",
        "torch.utils._python_dispatch._disable_current_modes",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    ),
    since="2.1",
    without="fxpipe does not start: nothing else says that a mode would see some stages only",
    needed=True,
)
PROFILED = Capability(
    what="whether a profiler records",
    names=("torch.autograd.profiler._is_profiler_enabled",),
    since="1.11",
    without="a profile of a step has torch's ops, without the actions and messages of the schedule",
)

TorchDispatchMode = _python_dispatch.TorchDispatchMode
__all__ = ["TorchDispatchMode", "active_modes", "is_profiled", "modes_are_active", "without_modes"]


def modes_are_active() -> bool:
    """Whether a mode sees what this thread does, or may see it."""
    if not ACTIVE_MODES.there:
        return True
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def active_modes() -> list[Any]:
    """The modes that see what this thread does, without that of the default device."""
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    ops = _python_dispatch._get_current_dispatch_mode_stack()
    return [*(mode for mode in functions if not isinstance(mode, DeviceContext)), *ops]


def is_profiled() -> bool:
    """Whether a profiler records, of this thread or of all."""
    return PROFILED.there and torch.autograd.profiler._is_profiler_enabled


def without_modes() -> AbstractContextManager[Any]:
    """A context in which no mode sees what ops do."""
    return _python_dispatch._disable_current_modes()
