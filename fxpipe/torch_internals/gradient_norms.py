"""Norms of gradients, which are wrong of a part of a model's gradients alone."""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.nn import utils
from torch.nn.utils import clip_grad, get_total_norm

from fxpipe.errors import FxpipeError

from .capability import Capability

CHECKED_NORMS = Capability(
    what="the norm of gradients, for torch's clipping too, under a name that can be given another function",
    names=("torch.nn.utils.clip_grad._get_total_norm",),
    since="2.6",
    without="a list of parameters or gradients of one rank is clipped by the norm of these alone, unsaid",
)
WHY = (
    "torch.nn.utils.get_total_norm, which clip_grad_norm_ calls, sees the gradients of one rank alone, and has another "
    "norm on each: fxpipe.clip_grad_norm_(pipe, max_norm) clips by the norm of all, and "
    "fxpipe.clip_grad_norm_(pipe, math.inf) returns it, and changes nothing"
)
total_norm = get_total_norm  # torch's own, for those who know that they have a part
_parts: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by id, as == of tensors compares numbers


def refuse_norms_of(parameters: Iterable[Tensor]) -> None:
    """From now on, torch's norms and clipping of gradients raise FxpipeError for those of these parameters."""
    _parts.update((id(parameter), parameter) for parameter in parameters)
    if CHECKED_NORMS.there and clip_grad._get_total_norm is total_norm:
        utils.get_total_norm = clip_grad._get_total_norm = _checked


def allow_norms_of(parameters: Iterable[Tensor]) -> None:
    """These parameters are no longer a part of a model's."""
    for parameter in parameters:
        _parts.pop(id(parameter), None)


@wraps(total_norm)
def _checked(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    given = [tensors] if isinstance(tensors, Tensor) else [*tensors]
    parts = {id(one) for parameter in _parts.values() for one in (parameter, parameter.grad) if one is not None}
    if any(id(one) in parts for one in given):
        raise FxpipeError(WHY)
    return total_norm(given, *args, **kwargs)
