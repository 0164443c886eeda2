"""What `F.batch_norm` checks before it calls a kernel, for code that calls the kernel itself."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def check_several_values(x: Tensor) -> None:
    """Raise the ValueError of `F.batch_norm` in training if each channel of `x`, its dimension 1, has one value."""
    if x.numel() == x.shape[1]:
        F.batch_norm(x, None, None, training=True)
