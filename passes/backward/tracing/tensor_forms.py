"""The tensors of a stage without the tensors: their forms, on which it depends what torch runs for an op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, *SYMBOLS)


class Inseparable(Exception):
    """What an op does may depend on more of the stage than the form of what it reads."""


@dataclass(frozen=True, eq=False)
class Form:
    """The form of a tensor, one object for each. `leaf`: as autograd has it."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    grad: bool
    leaf: bool

    def made(self) -> Tensor:
        """A fake tensor of the form, with memory of its own."""
        if self.grad and not self.leaf:
            return _Computed.apply(torch.empty((), requires_grad=True), self)  # type: ignore[no-any-return,no-untyped-call]
        return self.empty().requires_grad_(self.grad)

    def empty(self) -> Tensor:
        if type(self.offset) is int and self.offset == 0:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        steps = zip(self.shape, self.strides, strict=True)
        last = self.offset + sum((size - 1) * stride for size, stride in steps)
        whole = torch.empty([last + 1], dtype=self.dtype, device=self.device)
        return whole.as_strided(self.shape, self.strides, self.offset).detach()


class _Computed(torch.autograd.Function):
    """A tensor that is not a leaf."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, form: Form) -> Tensor:
        return form.empty()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("autograd stops at the tensors that an op reads")


@dataclass(eq=False)
class Gradients:
    """The gradients of a tensor, in backward. `called`: the tensor's names in the stage; `sum`: the name and form of
    the sum so far. A tensor that is written in place has others from then on."""

    called: list[str] = field(default_factory=list)
    sum: tuple[str, Form] | None = None


@dataclass(eq=False)
class Value:
    """A tensor of the stage. `name`: what recorded ops call it now; `view`: whether autograd counts it as a view."""

    name: str
    form: Form
    view: bool = False
    gradients: Gradients = field(default_factory=Gradients)


@dataclass(frozen=True)
class Place:
    """Stands for a tensor in the result of an op: one that it reads, or one that it makes."""

    read: bool
    number: int


def map_values(nest: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The value of an op with `change(x)` in place of each `x` of this kind."""
    if isinstance(nest, kind):
        return change(nest)
    if isinstance(nest, (tuple, list)) and type(nest) is not torch.Size:
        items = [map_values(item, kind, change) for item in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    return nest
