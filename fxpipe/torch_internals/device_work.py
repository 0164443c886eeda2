"""Work of a GPU that is given to it to measure something."""

from __future__ import annotations

import torch
from torch import Tensor

from .capability import Capability

BUSY = Capability(
    what="keep a GPU busy for a number of its clock cycles",
    names=("torch.cuda._sleep",),
    since="1.0",
    without="measured times of very short ops on CUDA contain the host's time to launch them",
)
SCALED_PRODUCTS = Capability(
    what="products of matrices of 8-bit floats",
    names=("torch._scaled_mm",),
    since="2.1",
    without="the speed of such products is not measured",
)


def keep_busy(device: torch.device, cycles: int) -> None:
    """Keep a CUDA device busy, so that the host comes ahead of it; others are left alone."""
    if device.type == "cuda" and BUSY.there:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def multiply_f8(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """The product of two matrices of f8, as bf16. Raises FxpipeError."""
    SCALED_PRODUCTS.need("to measure products of 8-bit floats")
    return torch._scaled_mm(a, b, scale, scale, out_dtype=torch.bfloat16)
