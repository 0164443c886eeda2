"""Why a call is captured, in words: how it differs from the calls captured before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .call_arguments import Call


@dataclass(frozen=True)
class CallSignature:
    """A summary of a kind of call: the mode of the model, and for each tensor its path and its type as text, with "b"
    for the batch."""

    training: bool
    tensors: tuple[tuple[str, str], ...]


def signature_of(call: Call, training: bool) -> CallSignature:
    """The signature of a call."""
    return CallSignature(
        training, tuple((leaf.path, _shown(leaf.real, leaf.batch_dim)) for leaf in call.leaves.values())
    )


def _shown(tensor: Tensor, batch_dim: int | None) -> str:
    sizes = ("b" if dim == batch_dim else str(size) for dim, size in enumerate(tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


def why_new(new: CallSignature, before: Sequence[CallSignature], what: str = "call", fixed: str = "") -> str:
    """What is new about a call; `before` are the signatures of all captured ones, `what` is a call or a step. `fixed`:
    the line that has made the last one be for one mode.

    >>> small, large = (CallSignature(True, (("x", f"float32[b, {size}]"),)) for size in (4, 8))
    >>> why_new(small, []), why_new(large, [small])
    ('first call', 'another shape, x is float32[b, 8] and was float32[b, 4]')
    >>> why_new(CallSignature(False, small.tensors), [small])
    'train to eval'
    """
    if not before:
        return f"first {what}"
    if all(one.training != new.training for one in before):
        turned = "eval to train" if new.training else "train to eval"
        return f"{turned}, which {fixed} tells apart" if fixed else turned
    alike = [dict(one.tensors) for one in before if one.training == new.training]
    now = dict(new.tensors)
    if now in alike:
        return "something else that the model depends on has changed"
    last = next((one for one in reversed(alike) if one.keys() == now.keys()), None)
    if last is None:
        return f"other arguments, {', '.join(now)}"
    name = next(name for name in now if now[name] != last[name])
    return f"another shape, {name} is {now[name]} and was {last[name]}"
