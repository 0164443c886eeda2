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


def move_to(tensor: Tensor, device: torch.device) -> None:
    """Move a tensor in place: optimizers, hooks and the user's variables refer to the same object as before."""
    if tensor.device == device:
        return
    grad = tensor.grad
    set_data(tensor, tensor.data.to(device))
    if grad is not None:
        set_data(grad, grad.data.to(device))
        tensor.grad = grad


def set_data(tensor: Tensor, data: Tensor) -> None:
    """Let `tensor` have the values of `data`, on its device, for all who refer to the tensor. To and from devices that
    are not torch's own it has no gradient then."""
    if _is_one_kind(tensor, data):
        tensor.data = data
        return
    # Two tensor objects exchange what they hold, and weak references, as nn.LSTM has to its weights, refer to the new.
    data.requires_grad_(tensor.requires_grad)
    if EXCHANGE.there:
        torch._C._swap_tensor_impl(tensor, data)
    else:
        torch.utils.swap_tensors(tensor, data)  # type: ignore[no-untyped-call]


def _is_one_kind(tensor: Tensor, data: Tensor) -> bool:
    if SAME_KIND.there:
        return bool(torch._has_compatible_shallow_copy_type(tensor, data))
    return tensor.device.type in OWN_DEVICES and data.device.type in OWN_DEVICES
