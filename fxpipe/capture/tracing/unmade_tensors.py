"""Tensors that are known and that nobody needs yet: what an op makes is known from an equal op, so it has not run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MADE = "fxpipe_made"  # in a node's `meta`: the tensor that Dynamo has made to stand for its value


@dataclass(frozen=True, eq=False)
class Kind:
    """All that decides what an op makes of a tensor.

    - `number`: another one for each kind.
    - `made`: whether an op has made it: it is a leaf only if it needs no gradient, and no lazy conjugate or negative.
    - `shape`, `stride`, `offset`, `bytes`: sizes, which may be symbolic; `bytes` is the size of its memory.
    """

    number: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    made: bool
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    bytes: Any

    def like(self) -> Tensor:
        """A tensor in memory of its own, with these sizes, strides and gradient."""
        return made_by_op(self.shape, self.stride, self.dtype, self.device, self.requires_grad)


def made_by_op(shape: Any, stride: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> Tensor:
    """A tensor in memory of its own, as an op makes it: no leaf, if it has a gradient."""
    with torch.enable_grad():
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        return made.requires_grad_().clone() if requires_grad else made


@dataclass(eq=False)
class Memory:
    """The memory of tensors: its address, or a number below 0 if none is made; and those to be made, in order."""

    address: int
    waiting: list[Unmade] = field(default_factory=list)


@dataclass(eq=False)
class Unmade:
    """A tensor that is not made yet: `make` makes it; then it is in `tensor`."""

    kind: Kind
    memory: Memory
    make: Callable[[], Tensor]
    tensor: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.kind.dtype

    @property
    def device(self) -> torch.device:
        return self.kind.device

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.kind.shape

    @property
    def requires_grad(self) -> bool:
        return self.kind.requires_grad


def settled(value: Any) -> Any:
    """The value, with the tensors in it that have been made by now."""
    if isinstance(value, Unmade):
        return value if value.tensor is None else value.tensor
    if isinstance(value, (tuple, list)) and any(isinstance(item, Unmade) and item.tensor is not None for item in value):
        return rebuilt(type(value), [settled(item) for item in value])
    return value


def rebuilt(kind: type, items: list[Any]) -> Any:
    """A list or a tuple, maybe with names, of these items."""
    return items if kind is list else kind._make(items) if hasattr(kind, "_make") else kind(items)
