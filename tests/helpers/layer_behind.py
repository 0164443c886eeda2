"""A layer behind what a model or a loss returns: what mixes samples before it is no epilogue, as the layer would run on
the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.torch_internals.pytrees import tree_map


class LayerBehind(nn.Module):
    """A function or a module, and a layer that returns what it is given."""

    def __init__(self, inner: Callable[..., Any], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.ones(1, 1, dtype=dtype))

    def forward(self, *args: Any) -> Any:
        return tree_map(lambda x: self.layer(x) if isinstance(x, Tensor) else x, self.inner(*args))

    def layer(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype).unsqueeze(-1) @ self.weight).squeeze(-1)
