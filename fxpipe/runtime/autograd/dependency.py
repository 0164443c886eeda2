"""Edges of the autograd graph that carry no gradient, only an order.

Autograd runs backward in any order that the graph allows, and micro-batches share no edge, so it may run B(0) before
B(1). A pipeline needs the reverse of forward's order on each device. `fork` and `join` add the missing edge, by means
of a token, a tensor without elements:

    F(0) ── y ── fork ── y ──▶ next stage             backward walks the edges from right to left:
                   │                                   B(1), then join, then fork, then B(0)
                 token
                   │
            x ── join ── x ── F(1) ── y ──▶ next stage
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def _aliases(ctx: Any, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The tensors as outputs of a function; those that need no gradient still need none."""
    ctx.set_materialize_grads(False)
    aliases = [x.detach() for x in tensors]
    without = [y for x, y in zip(tensors, aliases, strict=True) if not x.requires_grad]
    if without:
        ctx.mark_non_differentiable(*without)
    return aliases


class Fork(Function):
    """Aliases of the tensors, and a token that is ready in backward before their gradients are passed on."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (*_aliases(ctx, tensors), tensors[0].new_empty(0))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads[:-1]


class Join(Function):
    """Aliases of the tensors; their gradients must arrive before the token's backward runs."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        aliases = _aliases(ctx, tensors)
        return aliases[0] if len(aliases) == 1 else tuple(aliases)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads)


def fork(*tensors: Tensor) -> Any:
    """Aliases to use instead of the tensors, and at the end a token for `join`: `x, token = fork(x)`."""
    return Fork.apply(*tensors)  # type: ignore[no-untyped-call]


def join(token: Tensor | None, *tensors: Tensor) -> Any:
    """Aliases to use instead of the tensors: `x = join(token, x)`, `x, y = join(token, x, y)`. If the token is None,
    the tensors themselves."""
    if token is None:
        return tensors[0] if len(tensors) == 1 else tensors
    return Join.apply(token, *tensors)  # type: ignore[no-untyped-call]
