"""Tensors inside of a vmap."""

from __future__ import annotations

from torch import Tensor
from torch._C import _functorch

from fxpipe.torch_internals.capability import Capability

VMAP_LEVELS = Capability(
    what="which tensors are inside of a vmap",
    names=("torch._C._functorch.is_functorch_wrapped_tensor", "torch._C._functorch.get_unwrapped"),
    since="2.1",
    without="nothing is captured: a value inside of a vmap would be taken for a tensor of the model",
)


def in_vmap(tensor: Tensor) -> bool:
    """Whether a tensor lives inside of a vmap only."""
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))


def outside_vmaps(tensor: Tensor) -> Tensor:
    """The tensor of all rows, whose memory a tensor inside of vmaps has."""
    while in_vmap(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
