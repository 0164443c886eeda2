"""Backward from given gradients, without the checks of torch.autograd.backward and torch.autograd.grad.

Those take as long as the rest for a small stage (30 us): that each gradient has its tensor's shape and type. Here the
gradients are what autograd itself has made, so the engine has checked them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .capability import Capability

ENGINE = Capability(
    what="run a backward without its checks",
    names=("torch.autograd.Variable._execution_engine.run_backward",),
    since="1.8",
    without="torch.autograd.backward and torch.autograd.grad do it, slower; schedules that split it are refused",
)

Root = Tensor | GradientEdge


def add_gradients(roots: Sequence[Root], grads: Sequence[Tensor], keep_graph: bool = False) -> None:
    """Run backward from the roots, and add gradients to the `.grad` of all leaves."""
    if ENGINE.there:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.run_backward(
            tuple(roots), tuple(grads), keep_graph, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        torch.autograd.backward([*roots], [*grads], retain_graph=keep_graph)  # type: ignore[arg-type]


def gradients(
    roots: Sequence[Root],
    grads: Sequence[Tensor],
    wanted: Sequence[Root],
    keep_graph: bool = False,
    with_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of what is wanted, at least one; None for what backward does not reach. `with_graph`: they have
    derivatives themselves."""
    keep_graph = keep_graph or with_graph
    if ENGINE.there:
        engine: Any = torch.autograd.Variable._execution_engine
        found: tuple[Tensor | None, ...] = engine.run_backward(
            tuple(roots),
            tuple(grads),
            keep_graph,
            with_graph,
            tuple(wanted),
            allow_unreachable=True,
            accumulate_grad=False,
        )
        return found
    starts, ends = cast(Sequence[Tensor], roots), cast(Sequence[Tensor], wanted)  # either kind, torch's types say one
    return torch.autograd.grad(
        starts, ends, [*grads], retain_graph=keep_graph, create_graph=with_graph, allow_unused=True
    )
