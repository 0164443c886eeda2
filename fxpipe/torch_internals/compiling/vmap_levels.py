"""Tensors inside of a vmap, and whether one is entered."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fxpipe.torch_internals.capability import Capability

VMAP_LEVELS = Capability(
    what="which tensors are inside of a vmap, and whether this thread is",
    names=(
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "torch._C._functorch.peek_interpreter_stack",
        "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    ),
    since="2.1",
    without="nothing is captured: a value inside of a vmap would be taken for a tensor of the model",
)


def in_vmap(tensor: Tensor) -> bool:
    """Whether a tensor lives inside of a vmap only."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def vmap_is_entered() -> bool:
    """Whether ops of this thread run inside of a vmap."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_of_vmaps() -> AbstractContextManager[object]:
    """A context in which ops run outside of all vmaps."""
    found: AbstractContextManager[object] = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack()
    return found
