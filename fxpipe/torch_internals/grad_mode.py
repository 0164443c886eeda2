"""Modes that are set by a call, not by a context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.amp import autocast_mode
from torch.autograd import forward_ad

from .capability import Capability

SETTER = Capability(
    what="a function that switches gradients on and off in the time of one small call",
    names=("torch._C._set_grad_enabled",),
    since="1.5",
    without="torch.set_grad_enabled does it, which takes as long as a small op",
)
AUTOCAST_CALLS = Capability(
    what="functions that enter and leave an autocast, which an fx.Graph can call",
    names=("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast"),
    since="1.13",
    without="graphs of stages with an autocast of the model's own are refused",
)
ANY_AUTOCAST = Capability(
    what="whether any autocast is on, in one call",
    names=("torch._C._is_any_autocast_enabled",),
    since="1.13",
    without="each kind of device is asked",
)
FORWARD_MODE = Capability(
    what="derivatives in forward mode inside of an autograd.Function",
    names=("torch.autograd.forward_ad._set_fwd_grad_enabled",),
    since="1.11",
    without="models that make dual tensors in forward have no derivatives in a call with recomputation",
)


def gradient_setter() -> Callable[[bool], object]:
    """A function that switches gradients on and off in this thread, which an fx.Graph can call."""
    return torch._C._set_grad_enabled if SETTER.there else torch.set_grad_enabled


def forward_mode() -> AbstractContextManager[object]:
    """A context in which dual tensors have tangents, also in the forward of an autograd.Function."""
    return forward_ad._set_fwd_grad_enabled(True) if FORWARD_MODE.there else nullcontext()


def autocast_calls() -> tuple[Callable[..., object], Callable[..., object]]:
    """The functions to enter an autocast, with its arguments, and to leave it, with what the first has returned. Raises
    FxpipeError."""
    AUTOCAST_CALLS.need("graph_module of a model with an autocast in its forward")
    return autocast_mode._enter_autocast, autocast_mode._exit_autocast


def autocast_is_on() -> bool:
    """Whether an autocast may be on in this thread."""
    return not ANY_AUTOCAST.there or torch._C._is_any_autocast_enabled()
