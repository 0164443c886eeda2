"""Runs a stage of a step whose gradients are computed by generated code instead of autograd.

As in autograd, a result whose gradient does not arrive counts as one with a gradient of zeros; an argument or weight
gets None if no result that depends on it has a gradient that arrived. The gradients of the model's tensors are added to
those of the step's aliases, by the generated code itself where possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxpipe.runtime import Stage
from fxpipe.runtime.autograd import saved_tensors
from fxpipe.runtime.autograd.contiguous_layout import contiguous_ones, ordered
from fxpipe.runtime.caller_context import Context
from fxpipe.torch_internals.grad_mode import gradient_setter

from .kept_values import Kept
from .step_contract import Gradients

Grads = Sequence[Tensor | None]
NONE_MISSING = frozenset[int]()


class Like(NamedTuple):
    """What is left of a result, so that a gradient can be made for it."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def full(self, value: float) -> Tensor:
        return torch.full(self.shape, value, dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class DeferredWeightGrad:
    """What the second half of a backward needs.

    - `args`: the arguments of forward.
    - `values`: what the first half has handed on; None if no gradient arrived.
    - `missing`: the results of the stage, by place, whose gradient did not arrive.
    """

    args: tuple[Any, ...]
    values: list[Any] | None
    missing: frozenset[int]


class GeneratedBackward:
    """A stage with a backward of its own, in one step.

    - `weights`: the tensors in `stage.graded`, as the stage holds them in this step; an argument by its place, None for
      a tensor that needs no gradient.
    - `lent`: the places of these arguments.
    - `gradients`: the arguments and results that have a gradient.
    - `sized`: whether a gradient may have to be made for a result: its shape is kept.
    - `inputs`: the caller's inputs that get a gradient: their pieces, by the stages that take them and micro-batch.
    - `trains`: whether a tensor of the stage needs a gradient; `flows`: whether the results of the last forward do.
    - `plain`: whether the stage's code may be called with what has arrived, if gradients are switched off, all tensors
      are contiguous, and all gradients have arrived.
    """

    __slots__ = (
        "_run", "_run_backward", "flows", "gradients", "inputs", "lent", "plain", "sized", "stage", "trains", "weights",
    )  # fmt: skip

    def __init__(
        self,
        stage: Stage,
        gradients: Gradients,
        outputs: Iterable[str],
        context: Context,
        inputs: Mapping[str, Sequence[Sequence[Tensor]]],
    ) -> None:
        """`outputs`: the names of the values that the step returns, the loss among them."""
        self.stage, self.gradients, self.inputs = stage, gradients, inputs
        held = [where if isinstance(where, int) else where[0][where[1]] for where in stage.graded_slots]
        self.weights = [one if isinstance(one, int) or one.requires_grad else None for one in held]
        self.lent = frozenset(where for where in self.weights if isinstance(where, int))
        self.sized = len(gradients.gives) > 1 or not gradients.gives.keys().isdisjoint(outputs)
        self.trains = self.flows = bool(stage.trainable())
        self._run = run_in_autocast if context.autocasts else run
        looked_for = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        self._run_backward = partial(_look_for_nan, self._run) if looked_for else self._run
        self.plain = self.trains and not (self.lent or stage.orders or looked_for or context.autocasts)

    def forward(self, args: Sequence[Any], kept: Kept | None, hooks: Any) -> Any:
        """The results of forward. `kept`, if there is one, gets what backward needs, counted by the step's hooks for
        saved tensors, if it has any."""
        found = self._run(self.stage.forward, self._arguments(args))
        results = found[:-1]
        if kept is not None:
            self.keep(kept, results, found[-1] if hooks is None else counted(found[-1], hooks))
        return results[0] if len(results) == 1 else results

    def forward_beside_backward(
        self, args: Sequence[Any], other: GeneratedBackward, method: str, kept: Kept, grads: Grads
    ) -> tuple[tuple[Any, ...], list[Any], list[Any]] | None:
        """Forward on `args`, as one `method` of the stage with the backward of `other` on what it has `kept`: the
        results, what the stage's backward needs, and the gradients of the other's arguments. None, and nothing has run,
        if there is no backward because no gradient has arrived."""
        given, missing = other._arrived(kept, grads)
        if given is None:
            return None
        stages = () if other is self else (other.stage,)
        sums = other.sums(kept.args, missing)
        every = (*stages, *self._arguments(args), uncounted(kept, None), sums, *given)
        *results, values, takes, weights = self._run(getattr(self.stage, method), every)
        return tuple(results), values, other._added(kept, takes, weights, sums, missing)

    def _arguments(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments of forward in the layout with which it was traced; notes whether the results need gradients."""
        self.flows = self.trains or any(isinstance(x, Tensor) and x.requires_grad for x in args)
        return laid_out(self.stage, args) if self.stage.orders else contiguous_ones(args)

    def keep(self, kept: Kept, results: tuple[Any, ...], values: list[Any]) -> None:
        """Keep what backward needs, and free the arguments and results of a forward that it does not look up. What
        stays: arguments that are lent, the caller's inputs that get a gradient, the shapes of results, and the loss."""
        needed = self.lent
        if self.inputs:
            pieces = {id(piece) for several in self.inputs.values() for each in several for piece in each}
            needed = needed.union(place for place, x in enumerate(kept.args) if id(x) in pieces)
        kept.args = tuple([x if place in needed else None for place, x in enumerate(kept.args)]) if needed else ()
        kept.results = tuple(map(without_data, results)) if self.sized else ()
        kept.values = values

    def backward(self, kept: Kept, grads: Grads, hooks: Any) -> list[Any]:
        """The gradients of the arguments of the stage; those of the weights are added to theirs."""
        given, missing = self._arrived(kept, grads)
        if given is None:
            return [None] * len(self.gradients.takes)
        sums = self.sums(kept.args, missing)
        takes, weights = self._run_backward(self.stage.backward, (uncounted(kept, hooks), sums, *given))
        return self._added(kept, takes, weights, sums, missing)

    def _added(
        self, kept: Kept, takes: list[Any], weights: list[Any], sums: list[Tensor | None], missing: frozenset[int]
    ) -> list[Any]:
        """The gradients of the arguments, once those of the weights have been added to theirs."""
        if missing:
            weights, takes = self._reached(weights, missing, len(takes)), self._reached(takes, missing)
        self.add(weights, sums, kept.args)
        return takes

    def input_gradient(self, kept: Kept, grads: Grads, hooks: Any) -> tuple[list[Any], DeferredWeightGrad]:
        """The gradients of the arguments of the stage, and what `weight_gradient` needs, counted by `hooks`."""
        given, missing = self._arrived(kept, grads)
        if given is None:
            return [None] * len(self.gradients.takes), DeferredWeightGrad(kept.args, None, missing)
        takes, handed = self._run_backward(self.stage.input_gradient, (uncounted(kept, hooks), *given))
        return self._reached(takes, missing), DeferredWeightGrad(kept.args, counted(handed, hooks), missing)

    def weight_gradient(self, deferred: DeferredWeightGrad, hooks: Any) -> None:
        """Add the gradients of the weights."""
        if deferred.values is not None:
            sums = self.sums(deferred.args, deferred.missing)
            found = self._run_backward(self.stage.weight_gradient, (uncounted(deferred, hooks), sums))
            self.add(self._reached(found, deferred.missing, len(self.gradients.takes)), sums, deferred.args)

    def _arrived(self, kept: Kept, grads: Grads) -> tuple[Grads | None, frozenset[int]]:
        """The gradients that the stage's code expects, zeros for those that are missing, and which are. None if all
        are."""
        for grad in grads:
            if grad is None:
                break
        else:
            return contiguous_ones(grads), NONE_MISSING
        arrives = self.stage.arrives or (True,) * len(grads)
        missing = frozenset([k for k, grad in enumerate(grads) if grad is None and arrives[k]])
        if len(missing) == sum(arrives):
            return None, missing
        if not missing:
            return contiguous_ones(grads), missing
        results = kept.results or ()
        likes = [results[place] for place in self.gradients.gives.values()]
        return contiguous_ones([full(likes[k], 0.0) if k in missing else x for k, x in enumerate(grads)]), missing

    def _reached(self, found: list[Any], missing: frozenset[int], start: int = 0) -> list[Any]:
        """The gradients, with None in place of those that depend on missing ones only. `start`: the place of the first
        among all that backward returns."""
        reaches = self.stage.reaches
        if not missing or not reaches:
            return found
        return [None if missing.issuperset(reaches[start + k]) else grad for k, grad in enumerate(found)]

    def sums(self, args: Sequence[Any] = (), missing: frozenset[int] = NONE_MISSING) -> list[Tensor | None]:
        """For each weight the sum of its gradients until now, to which the stage's code may add; None if there is none,
        or if it depends on missing gradients whether it gets one."""
        if missing:
            return [None] * len(self.weights)
        if not self.lent:
            return [None if weight is None else weight.grad for weight in self.weights]  # type: ignore[union-attr]
        weights = [args[weight] if isinstance(weight, int) else weight for weight in self.weights]
        return [weight.grad if weight is not None and weight.requires_grad else None for weight in weights]

    def add(self, found: Sequence[Tensor | None], sums: Sequence[Tensor | None], args: Sequence[Any] = ()) -> None:
        """Add the gradients to those of the weights, where the stage's code has not added them to these `sums`. `args`:
        the arguments of forward, for weights that are lent."""
        for weight, grad, summed in zip(self.weights, found, sums, strict=True):
            if grad is None or grad is summed or weight is None:
                continue
            if isinstance(weight, int):
                weight = args[weight]
                if not weight.requires_grad:
                    continue
            held = weight.grad
            if held is not None:
                held.add_(grad)  # not +=, which would set the attribute too
            else:
                weight.grad = grad if grad.stride() == weight.stride() else torch.empty_like(weight).copy_(grad)


def run(method: Callable[..., Any], args: Iterable[Any]) -> Any:
    """What the method returns, computed without autograd."""
    if not torch.is_grad_enabled():
        return method(*args)
    set_gradients = gradient_setter()
    set_gradients(False)  # as torch.no_grad, which takes as long as a small op
    try:
        return method(*args)
    finally:
        set_gradients(True)


def run_in_autocast(method: Callable[..., Any], args: Iterable[Any]) -> Any:
    """`run` where the caller has autocast on: it is written out in the code."""
    with Context(False, False, ()).enter_autocast():
        return run(method, args)


class NanSearch(TorchFunctionMode):
    """In this context a function that returns nan raises RuntimeError, as in autograd's anomaly detection."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and bool(x.isnan().any()):
                raise RuntimeError(f"{getattr(func, '__name__', func)} returned nan in backward")
        return found


def _look_for_nan(run: Callable[..., Any], method: Callable[..., Any], args: Iterable[Any]) -> Any:
    """What `run` returns. Raises RuntimeError where backward returns nan; at its line if Python runs it."""
    with NanSearch():
        return run(method, args)


def laid_out(stage: Stage, args: Sequence[Any]) -> list[Any]:
    """The arguments of forward in the layouts of memory that `stage.orders` says, with which the stage was traced."""
    orders = (*stage.orders, *[()] * (len(args) - len(stage.orders)))  # what is lent, and `draw`, come last
    return [ordered(x, order) if isinstance(x, Tensor) else x for x, order in zip(args, orders, strict=True)]


def without_data(result: Any) -> Any:
    """A tensor's shape; the loss, a single number, stays a tensor."""
    return Like(result.shape, result.dtype, result.device) if isinstance(result, Tensor) and result.dim() else result


def full(like: Like | Tensor, value: float) -> Tensor:
    """A tensor like this result, of this value."""
    return like.full(value) if isinstance(like, Like) else torch.full_like(like, value)


def counted(values: list[Any], hooks: Any) -> list[Any]:
    """The values, counted by the step's hooks for saved tensors, if it has any."""
    if not isinstance(hooks, saved_tensors.Saved):
        return values
    return [hooks.keep(x) if isinstance(x, Tensor) else x for x in values]


def uncounted(kept: Kept | DeferredWeightGrad, hooks: Any) -> list[Any]:
    """What backward needs. `kept` lets go of it."""
    values, kept.values = kept.values or [], []
    if not isinstance(hooks, saved_tensors.Saved):
        return values
    return [x.give() if isinstance(x, saved_tensors.Kept) else x for x in values]
