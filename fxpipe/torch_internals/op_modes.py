"""Modes that see every op that torch runs."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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

__all__ = ["TorchDispatchMode", "modes_are_active"]


def modes_are_active() -> bool:
    """Whether a mode sees what this thread does, or may see it."""
    if not ACTIVE_MODES.there:
        return True
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())
