"""Gives gradients that are added up in place memory of their own.

autograd makes the first gradient that reaches a parameter its `.grad`, without a copy, if nothing else refers to that
tensor object. But another tensor may share its memory, through a view:

    y = x + w.view_as(x)        the gradients of y, x and w are one piece of memory;
                                the next `w.grad += ...` writes to all of them

In one backward this has no effect. In a pipeline the gradient of x may still be on its way to the previous stage when
the next micro-batch is added to that of w. (In plain torch 2.13 two parameters with `a.view(n, m) + b.view(n, m)` each
get three times the gradient instead of twice after two backwards.)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fxpipe.torch_internals.tensor_memory import is_shared


def unshare(parameters: Iterable[Tensor]) -> None:
    """Copy the gradients whose memory other tensors share. Call it when the parameters have their first gradients."""
    for parameter in parameters:
        grad = parameter.grad
        if grad is not None and grad.layout == torch.strided and is_shared(grad):
            parameter.grad = grad.clone()
