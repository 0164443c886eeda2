"""The caller's modes, to be entered on another thread: grad mode, inference mode and autocast.

torch keeps these per thread, so the caller's `with torch.autocast(...)` has no effect on a worker. The default dtype is
the same on all threads.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from fxpipe.torch_internals.grad_mode import autocast_is_on

from .accelerator import kinds


@dataclass(frozen=True)
class Autocast:
    """The arguments of an active `torch.autocast`."""

    device: str
    dtype: torch.dtype
    cache: bool


@dataclass(frozen=True)
class Context:
    """The modes that a thread must enter to work as the caller would. A fresh thread is only in grad mode."""

    grad: bool
    inference: bool
    autocasts: tuple[Autocast, ...]

    @property
    def plain(self) -> bool:
        """Whether these are the modes of a fresh thread."""
        return self.grad and not self.inference and not self.autocasts

    def enter(self) -> ExitStack:
        """`with context.enter(): ...` on a worker."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for cast in self.autocasts:
            stack.enter_context(torch.autocast(cast.device, cast.dtype, cache_enabled=cast.cache))
        return stack

    def enter_autocast(self) -> ExitStack:
        """Enter autocast only, for a checkpointed run, where the autograd function sets grad mode. Autocast's cache of
        cast weights is off: a recomputation could find a cast that was made without grad, and its weight would get no
        gradient."""
        stack = ExitStack()
        for device in kinds():
            cast = next((cast for cast in self.autocasts if cast.device == device), None)
            if cast is not None:
                stack.enter_context(torch.autocast(device, cast.dtype, cache_enabled=False))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        return stack


PLAIN = Context(grad=True, inference=False, autocasts=())


def current_context() -> Context:
    """The modes of this thread."""
    if not autocast_is_on():
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return PLAIN if grad and not inference else Context(grad, inference, ())
    casts = [
        Autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        for device in kinds()
        if torch.is_autocast_enabled(device)
    ]
    return Context(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), tuple(casts))
