"""Why a call is captured, in words: how it differs from the calls captured before."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .call_arguments import Call, paths_of


@dataclass(frozen=True)
class CallSignature:
    """A summary of a kind of call: the mode of the model, for each tensor its path and its type as text, with "b" for
    the batch, the type that autocast gives, if it is on, by device, the paths of each tensor that has several, and
    whether gradients are on."""

    training: bool
    tensors: tuple[tuple[str, str], ...]
    autocast: tuple[tuple[str, str], ...] = ()
    same: tuple[tuple[str, ...], ...] = ()
    grad: bool = True


def signature_of(call: Call, training: bool) -> CallSignature:
    """The signature of a call."""
    paths = paths_of(call)
    tensors = tuple(
        (path, _shown(leaf.real, leaf.batch_dim)) for key, leaf in call.leaves.items() for path in paths[key]
    )
    kinds = dict.fromkeys(("cpu", getattr(torch.accelerator.current_accelerator(), "type", "cpu")))
    cast = {kind: _name(torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)}
    same = tuple(tuple(several) for several in paths.values() if len(several) > 1)
    return CallSignature(training, tensors, tuple(cast.items()), same, torch.is_grad_enabled())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(tensor: Tensor, batch_dim: int | None) -> str:
    sizes = ("b" if dim == batch_dim else str(size) for dim, size in enumerate(tensor.shape))
    return f"{_name(tensor.dtype)}[{', '.join(sizes)}]"


def why_new(
    new: CallSignature, before: Sequence[CallSignature], what: str = "call", has_set: Collection[str] = ()
) -> str:
    """What is new about a call; `before` are the signatures of all captured ones, `what` is a call or a step, `has_set`
    are the attributes that forward has set.

    >>> small, large = (CallSignature(True, (("x", f"float32[b, {size}]"),)) for size in (4, 8))
    >>> why_new(small, []), why_new(large, [small])
    ('first call', 'another shape, x is float32[b, 8] and was float32[b, 4]')
    >>> why_new(CallSignature(False, small.tensors), [small])
    'train to eval'
    >>> why_new(CallSignature(True, small.tensors, (("cpu", "bfloat16"),)), [small])
    'autocast is bfloat16 on cpu, and was off'
    >>> both = (("ids", "int64[b]"), ("labels", "int64[b]"))
    >>> why_new(CallSignature(True, both), [CallSignature(True, both, same=(("ids", "labels"),))])
    'ids and labels are not one tensor, and were'
    >>> why_new(small, [small], has_set=["Config.problem_type"])
    'something else that the model depends on has changed; forward sets Config.problem_type'
    """
    if not before:
        return f"first {what}"
    if all(one.training != new.training for one in before):
        return "eval to train" if new.training else "train to eval"
    alike = [dict(one.tensors) for one in before if one.training == new.training]
    now = dict(new.tensors)
    if now in alike:
        same = [one for one in before if one.training == new.training and dict(one.tensors) == now]
        if all(one.autocast != new.autocast for one in same):
            return _of_autocast(new) + ", and was " + _of_autocast(same[-1]).removeprefix("autocast is ")
        if all(one.grad != new.grad for one in same):
            return "gradients are on, and were off" if new.grad else "gradients are off, and were on"
        if all(one.same != new.same for one in same if one.autocast == new.autocast):
            return _of_same(new.same, same[-1].same)
        found = f"; forward sets {', '.join(sorted(has_set))}" if has_set else ""
        return f"something else that the model depends on has changed{found}"
    last = next((one for one in reversed(alike) if one.keys() == now.keys()), None)
    if last is None:
        return f"other arguments, {', '.join(now)}"
    name = next(name for name in now if now[name] != last[name])
    return f"another shape, {name} is {now[name]} and was {last[name]}"


def _of_autocast(one: CallSignature) -> str:
    return f"autocast is {', '.join(f'{dtype} on {kind}' for kind, dtype in one.autocast) or 'off'}"


def _of_same(now: tuple[tuple[str, ...], ...], before: tuple[tuple[str, ...], ...]) -> str:
    joined = next((paths for paths in now if paths not in before), None)
    if joined is not None:
        return f"{' and '.join(joined)} are one tensor, and were not"
    return f"{' and '.join(next(paths for paths in before if paths not in now))} are not one tensor, and were"
