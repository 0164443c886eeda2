"""Tensors inside of a vmap, and whether one is entered."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor
from torch._C import _functorch

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
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))


def vmap_is_entered() -> bool:
    """Whether ops of this thread run inside of a vmap."""
    return _functorch.peek_interpreter_stack() is not None


def outside_of_vmaps() -> AbstractContextManager[object]:
    """A context in which ops run outside of all vmaps."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    found: AbstractContextManager[object] = temporarily_clear_interpreter_stack()
    return found
