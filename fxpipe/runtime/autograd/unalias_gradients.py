"""A gradient that is added up in place has its memory for itself.

autograd takes the first gradient that reaches a parameter as the parameter's `.grad`, without a copy, if nobody else
has that very tensor. But another may have the same memory, through a view:

    y = x + w.view_as(x)        the gradients of y, x and w are one piece of memory;
                                the next `w.grad += ...` writes to all of them

In one backward nobody would notice. Here the gradient of x is still on its way to the stage before when the next
micro-batch is added to that of w. (And in plain torch 2.13 two parameters with `a.view(n, m) + b.view(n, m)` each get
three times the gradient instead of twice after two backwards.)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def unshare(parameters: Iterable[Tensor]) -> None:
    """Copy the gradients whose memory somebody else has too: to be called when the parameters have got their first."""
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.layout == torch.strided and shared(grad):
            parameter.grad = grad.clone()


def shared(tensor: Tensor) -> bool:
    """Whether another tensor has the same memory: the storage counts the tensor, its Python object, and others."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)
