"""Aliases of the model's parameters during a step, so that a step happens wholly or not at all.

A step runs backward once per micro-batch and stage, on several threads. If each gradient were added to the model's
parameters at once, a failed step would leave some of the gradients, a weight that two stages share would get them in
any order, and a hook on a parameter would see pieces. So each stage computes with aliases: leaves that share the
parameter's memory and collect its gradients, which are added to the parameter once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import FxpipeError
from fxpipe.runtime.autograd.contiguous_layout import contiguous, is_contiguous
from fxpipe.runtime.stage import Stage
from fxpipe.torch_internals.tensor_memory import has_hooks, has_late_hooks

Pair = tuple[Tensor, Tensor]  # a tensor of the model, and its alias


def alias(tensor: Tensor) -> Tensor:
    """A leaf with the same memory."""
    return tensor.detach().requires_grad_()


class standing_in:  # lower case, as contextlib.suppress; @contextmanager would take several times as long
    """A context in which the stages hold aliases of all tensors that need a gradient; gives the pairs of each stage.
    Where code computes gradients, it counts on contiguous memory: tensors of another layout, such as `channels_last`,
    are copied."""

    __slots__ = ("_stages", "_swapped")

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._swapped: list[tuple[dict[str, Any], str, Tensor]] = []

    def __enter__(self) -> list[list[Pair]]:
        try:
            return [self._pairs(stage) for stage in self._stages]
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for held, name, tensor in self._swapped:
            held[name] = tensor

    def _pairs(self, stage: Stage) -> list[Pair]:
        pairs, swapped, graded = [], self._swapped, stage.graded is not None
        for held, name in stage.slots:
            tensor = plain = held[name]
            wanted = tensor.requires_grad
            if wanted:
                plain = tensor.detach()
            if graded and not is_contiguous(plain):
                plain = contiguous(plain)
                if not tensor.is_contiguous() and any(stage.tensor(path) is tensor for path in stage.mutates):
                    raise FxpipeError(
                        f"{type(stage).__name__} writes into {name}, which is not contiguous in memory, as "
                        "backward='code' needs it: make it contiguous, or write backward='autograd'"
                    )
            if wanted:
                pairs.append((tensor, plain.requires_grad_()))
            if plain is not tensor:
                swapped.append((held, name, tensor))
                held[name] = plain
        return pairs


def put_together(pairs: Sequence[Pair], stages: Sequence[Stage]) -> list[Pair]:
    """The pairs, with the pairs of parts of a tensor joined into one for the whole tensor. Autograd would make a
    zero-filled gradient of the whole for each part, and add all of them."""
    parts = {
        id(stage.tensor(path)): (stage.elsewhere[path], region)
        for stage in stages
        for path, region in stage.regions.items()
    }
    if not parts:
        return list(pairs)
    others, wholes = list[Pair](), dict[int, Pair]()
    for tensor, stand_in in pairs:
        if id(tensor) not in parts:
            others.append((tensor, stand_in))
        elif stand_in.grad is not None:
            whole, region = parts[id(tensor)]
            _, found = wholes.setdefault(id(whole), (whole, alias(whole)))
            found.grad = torch.zeros_like(whole) if found.grad is None else found.grad
            found.grad[region] += stand_in.grad.to(whole.device)
    return [*others, *wholes.values()]


def commit_gradients(pairs: Sequence[Pair]) -> None:
    """Add the aliases' gradients to those of the model's tensors. Hooks see the sum, once. If a tensor was computed
    outside of the model, autograd passes its gradient on."""
    found: dict[int, Pair] = {}
    for tensor, stand_in in pairs:
        grad = stand_in.grad
        if grad is None:
            continue
        grad = grad if grad.device == tensor.device else grad.to(tensor.device)
        known = found.get(id(tensor))
        found[id(tensor)] = tensor, grad if known is None else known[1] + grad
    first: list[Pair] = []
    backward: list[Pair] = []
    for tensor, grad in found.values():
        hooks = has_hooks(tensor) or has_late_hooks(tensor)
        simple = tensor.is_leaf and tensor.grad is None and not hooks and grad.layout is tensor.layout
        (first if simple else backward).append((tensor, grad))
    if backward:
        tensors, grads = zip(*backward, strict=True)
        torch.autograd.backward(tensors, grads)
    try:
        _put(first)
    except BaseException:  # Ctrl-C half way
        _put(first)
        raise


def _put(pairs: Sequence[Pair]) -> None:
    """Set the gradients of tensors that have none, without the copy that autograd would make."""
    for tensor, grad in pairs:
        tensor.grad = grad
