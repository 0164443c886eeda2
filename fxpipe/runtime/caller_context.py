"""The caller's modes, to be entered on another thread: grad and inference mode, autocast, the CUDA streams.

torch keeps these per thread, so a worker knows nothing of the caller's `with torch.autocast(...)`. The default dtype
is one for all threads and needs no carrying.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """The arguments of an active `torch.autocast`."""

    device: str
    dtype: torch.dtype
    cache: bool


@dataclass(frozen=True)
class Context:
    """What a thread must enter to work as the caller would. A fresh thread is in grad mode and in nothing else."""

    grad: bool
    inference: bool
    autocasts: tuple[Autocast, ...]

    @property
    def plain(self) -> bool:
        """A fresh thread has it already."""
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
        """Autocast alone, for a checkpointed run, where the function itself sets grad mode. Never with autocast's
        cache of cast weights: a cast cached without grad would be found by the recomputation, and its weight get no
        gradient."""
        stack = ExitStack()
        for device in ("cpu", "cuda"):
            cast = next((cast for cast in self.autocasts if cast.device == device), None)
            if cast is not None:
                stack.enter_context(torch.autocast(device, cast.dtype, cache_enabled=False))
            elif torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        return stack


def current_context() -> Context:
    """The modes of this thread."""
    casts = [
        Autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled())
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
    return Context(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), tuple(casts))
