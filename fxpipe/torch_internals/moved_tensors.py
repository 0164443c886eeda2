"""A tensor that becomes another one, for all who refer to it."""

from __future__ import annotations

import torch
from torch import Tensor

from .capability import Capability

SAME_KIND = Capability(
    what="whether `tensor.data = data` is allowed",
    names=("torch._has_compatible_shallow_copy_type",),
    since="1.3",
    without="it is allowed for two tensors of torch's own devices",
)
EXCHANGE = Capability(
    what="let two tensors exchange what they hold while others refer to them weakly",
    names=("torch._C._swap_tensor_impl",),
    since="2.3",
    without="torch.utils.swap_tensors does it, which refuses tensors with weak references, as nn.LSTM has",
)
OWN_DEVICES = ("cpu", "cuda")


def can_share_memory(tensor: Tensor, data: Tensor) -> bool:
    """Whether `tensor.data = data` is allowed."""
    if SAME_KIND.there:
        return bool(torch._has_compatible_shallow_copy_type(tensor, data))
    return tensor.device.type in OWN_DEVICES and data.device.type in OWN_DEVICES


def become(tensor: Tensor, data: Tensor) -> None:
    """Let `tensor` be what `data` is, on whatever device. Raises RuntimeError."""
    if EXCHANGE.there:
        torch._C._swap_tensor_impl(tensor, data)
    else:
        torch.utils.swap_tensors(tensor, data)  # type: ignore[no-untyped-call]
