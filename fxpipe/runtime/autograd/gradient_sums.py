"""Adds gradients of several micro-batches, where generated code computes them.

At once, not when all of a stage's are there: their memory is taken again by the next one, and does not have to be
fetched anew from the system. A product of matrices is added by the kernel that computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The gradient, added in place to `total`, the sum of those before it; itself if it is the first. None counts as
    nothing: code that is kept whole may have no gradient for a tensor."""
    if gradient is None:
        return total
    return gradient if total is None else total.add_(gradient)


def accumulate_mm(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """`accumulate(total, torch.mm(left, right))`, without a matrix for the product."""
    return torch.mm(left, right) if total is None else total.addmm_(left, right)
