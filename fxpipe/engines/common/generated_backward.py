"""Runs the stages of a step whose gradients are computed by generated code instead of autograd.

What autograd does for other stages is done here: a gradient that does not arrive counts as zero, and what depends on no
gradient that arrived gets None; the gradients of the model's tensors are added to those of the step's aliases.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpipe.runtime import Stage
from fxpipe.runtime.autograd import saved_tensors
from fxpipe.runtime.autograd.contiguous_layout import contiguous, ordered
from fxpipe.runtime.caller_context import Context

from .kept_values import Kept

Grads = Sequence[Tensor | None]
NONE_MISSING = frozenset[int]()


class Like(NamedTuple):
    """What is left of a result, so that a gradient can be made for it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def full(self, value: float) -> Tensor:
        return torch.full(self.shape, value, dtype=self.dtype, device=self.device)


@dataclass
class Later:
    """What the second half of a backward needs.

    - `args`: the arguments of forward.
    - `values`: what the first half has handed on; None if no gradient arrived.
    - `missing`: the results of the stage, by place, whose gradient did not arrive.
    """

    args: tuple[Any, ...]
    values: list[Any] | None
    missing: frozenset[int]


def forward(stage: Stage, kept: Kept, context: Context, hooks: Any) -> Any:
    """The results of forward; what backward needs goes to `kept.values`, counted by the step's hooks for saved tensors,
    if it has any."""
    *results, values = _run(stage.forward, context, _laid_out(stage, kept.args))
    kept.values = _counted(values, hooks)
    return results[0] if len(results) == 1 else tuple(results)


def _run(method: Callable[..., Any], context: Context, args: Iterable[Any]) -> Any:
    """What the method returns, computed without autograd. The caller's autocast is written out in the code."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # as torch.no_grad, which takes as long as a small op
    try:
        if not context.autocasts:
            return method(*args)
        with Context(False, False, ()).enter_autocast():
            return method(*args)
    finally:
        torch._C._set_grad_enabled(before)


def graded_tensors(stage: Stage) -> list[Tensor | int]:
    """The tensors in `stage.graded`, as the stage holds them now; an argument by its place."""

    def found(where: str | int) -> Tensor | int:
        if isinstance(where, int):
            return where
        tensor: Tensor = getattr(stage, where) if where in stage.constants else stage.tensor(where)
        return tensor

    return [found(where) for where in stage.graded or ()]


def let_go(
    stage: Stage, kept: Kept, graded: Iterable[Tensor | int], inputs: Mapping[str, Sequence[Sequence[Tensor]]]
) -> None:
    """Free the arguments and results of a forward that backward does not look up. What stays: arguments that are lent,
    the caller's inputs that get a gradient, the shapes of results, and the loss. `graded`: as of `graded_tensors`."""
    needed = {place for place in graded if isinstance(place, int)}
    if inputs:
        pieces = {id(piece) for several in inputs.values() for each in several for piece in each}
        needed |= {place for place, x in enumerate(kept.args) if id(x) in pieces}
    kept.args = tuple([x if place in needed else None for place, x in enumerate(kept.args)]) if needed else ()
    assert kept.results is not None
    kept.results = tuple([_without_data(result) for result in kept.results])


def _without_data(result: Any) -> Any:
    """A tensor's shape; the loss, a single number, stays a tensor."""
    return Like(result.shape, result.dtype, result.device) if isinstance(result, Tensor) and result.dim() else result


def _counted(values: list[Any], hooks: Any) -> list[Any]:
    """The values, counted by the step's hooks for saved tensors, if it has any."""
    if not isinstance(hooks, saved_tensors.Saved):
        return values
    return [hooks.keep(x) if isinstance(x, Tensor) else x for x in values]


def _laid_out(stage: Stage, args: Sequence[Any]) -> list[Any]:
    """The arguments of forward in the layout of memory with which the stage was traced."""
    if not stage.orders:
        return _contiguous(args)
    orders = (*stage.orders, *[()] * (len(args) - len(stage.orders)))  # what is lent, and `draw`, come last
    return [ordered(x, order) if isinstance(x, Tensor) else x for x, order in zip(args, orders, strict=True)]


def _contiguous(values: Iterable[Any]) -> list[Any]:
    """The values in the layout of memory with which the stage was traced: its kernels may rely on it."""
    return [contiguous(x) if isinstance(x, Tensor) and (1 in x.shape or not x.is_contiguous()) else x for x in values]


def backward(
    stage: Stage,
    kept: Kept,
    grads: Grads,
    places: Collection[int],
    context: Context,
    hooks: Any,
    graded: Sequence[Tensor | int],
) -> list[Any] | None:
    """The gradients of the arguments of stage; those of the weights are added to theirs. None if no gradient arrived.
    `places`: the results that can have a gradient; `graded`: as of `graded_tensors`."""
    given, missing = _arrived(stage, kept, grads, places)
    if given is None:
        return None
    takes, weights = _run(stage.backward, context, (_uncounted(kept, hooks), *given))
    if missing:
        weights, takes = _reached(stage, weights, missing, len(takes)), _reached(stage, takes, missing)
    _add(graded, kept.args, weights)
    found: list[Any] = takes
    return found


def input_gradient(
    stage: Stage, kept: Kept, grads: Grads, places: Collection[int], context: Context, hooks: Any
) -> tuple[list[Any] | None, Later]:
    """The gradients of the arguments of stage, None if no gradient arrived, and what `weight_gradient` needs, counted
    by `hooks`."""
    given, missing = _arrived(stage, kept, grads, places)
    if given is None:
        return None, Later(kept.args, None, missing)
    takes, handed = _run(stage.input_gradient, context, (_uncounted(kept, hooks), *given))
    return _reached(stage, takes, missing), Later(kept.args, _counted(handed, hooks), missing)


def weight_gradient(
    stage: Stage, later: Later, takes: int, context: Context, hooks: Any, graded: Sequence[Tensor | int]
) -> None:
    """Add the gradients of the weights. `takes`: how many arguments of the stage can have a gradient; `graded`: as of
    `graded_tensors`."""
    if later.values is not None:
        found = _run(stage.weight_gradient, context, [_uncounted(later, hooks)])
        _add(graded, later.args, _reached(stage, found, later.missing, takes))


def _arrived(
    stage: Stage, kept: Kept, grads: Grads, places: Collection[int]
) -> tuple[list[Tensor | None] | None, frozenset[int]]:
    """The gradients that the stage's code expects, zeros for those that are missing, and which are. None if all are."""
    if not stage.arrives and not any(grad is None for grad in grads):
        return _contiguous(grads), NONE_MISSING
    arrives = stage.arrives or (True,) * len(grads)
    missing = frozenset(k for k, grad in enumerate(grads) if arrives[k] and grad is None)
    if len(missing) == sum(arrives):
        return None, missing
    if not missing:
        return _contiguous(grads), missing
    results = kept.results or ()
    likes = [results[place] for place in places]
    return _contiguous(full(likes[k], 0.0) if k in missing else grad for k, grad in enumerate(grads)), missing


def full(like: Like | Tensor, value: float) -> Tensor:
    """A tensor like this result, of this value."""
    return like.full(value) if isinstance(like, Like) else torch.full_like(like.detach(), value)


def _reached(stage: Stage, found: list[Any], missing: frozenset[int], start: int = 0) -> list[Any]:
    """The gradients, with None in place of those that depend on missing ones only. `start`: the place of the first
    among all that backward returns."""
    if not missing or not stage.reaches:
        return found
    return [None if missing.issuperset(stage.reaches[start + k]) else grad for k, grad in enumerate(found)]


def _uncounted(kept: Kept | Later, hooks: Any) -> list[Any]:
    """What backward needs. `kept` lets go of it."""
    values, kept.values = kept.values or [], []
    if not isinstance(hooks, saved_tensors.Saved):
        return values
    return [x.give() if isinstance(x, saved_tensors.Kept) else x for x in values]


def _add(graded: Sequence[Tensor | int], args: Sequence[Any], found: Iterable[Tensor | None]) -> None:
    """Add the gradients to those of the tensors."""
    for weight, grad in zip(graded, found, strict=True):
        if isinstance(weight, int):
            weight = args[weight]
        if grad is None or not weight.requires_grad:
            continue
        held = weight.grad
        if held is not None:
            held.add_(grad)  # not +=, which would set the attribute too
        else:
            weight.grad = grad if grad.stride() == weight.stride() else torch.empty_like(weight).copy_(grad)
