"""The arguments of a call over ranks: arguments that a rank leaves out become meta tensors of the leader's shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpipe.capture import NO_TARGET
from fxpipe.capture.nested_values import change
from fxpipe.engines.ranks.input_checksums import checksum
from fxpipe.engines.ranks.rendezvous import LEADER
from fxpipe.errors import RankError

CallArguments = tuple[tuple[Any, ...], dict[str, Any], Any]  # args, kwargs, target


def on_meta(path: str, tensor: Tensor) -> Tensor:
    """A meta tensor like `tensor` (shape, strides, dtype), as it is sent to other ranks."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


def glance(given: CallArguments) -> tuple[Any, ...] | None:
    """A summary of the arguments: shapes, types and plain values; None if there are other kinds of arguments. Comparing
    summaries is ten times as fast as pickling."""
    args, kwargs, target = given
    found: list[Any] = [len(args), *kwargs]
    for value in (*args, *kwargs.values(), target):
        if isinstance(value, Tensor) and value.layout is torch.strided:
            found.append((value.shape, value.stride(), value.dtype, value.requires_grad))
        elif value is None or value is NO_TARGET or type(value) in (bool, int, float, str):
            found.append((type(value), value))
        else:
            return None
    return tuple(found)


def filled(signatures: CallArguments, given: CallArguments) -> CallArguments:
    """The arguments of this rank; those that are left out or None are the leader's, from `signatures`."""

    def stand_in(value: Any, theirs: Any) -> Any:
        return theirs if value is None else value

    (args, kwargs, target), (own_args, own_kwargs, own_target) = signatures, given
    new = tuple(own_args[at] if at < len(own_args) else arg for at, arg in enumerate(args)) + own_args[len(args) :]
    named = {**kwargs, **own_kwargs}
    pairs = zip(new, (*args, *new[len(args) :]), strict=True)
    return (
        tuple(stand_in(value, theirs) for value, theirs in pairs),
        {key: stand_in(value, kwargs.get(key)) for key, value in named.items()},
        target if own_target is NO_TARGET else stand_in(own_target, target),
    )


def check_same(given: CallArguments, signatures: CallArguments, rank: int) -> None:
    """Raise RankError if a tensor's shape, type or need of a gradient differs from the leader's."""
    ours, theirs = tensors_in(given), tensors_in(signatures)
    for path in ours.keys() & theirs.keys():
        here, there = ((x.dtype, list(x.shape), x.requires_grad) for x in (ours[path], theirs[path]))
        if here[:2] == there[:2] and here != there:
            one, other = (LEADER, rank) if there[2] else (rank, LEADER)
            raise RankError(
                f"{path} requires a gradient on rank {one} and not on rank {other}: call requires_grad_() on both, or "
                "on neither"
            )
        if here != there:
            raise RankError(
                f"rank {rank} was given {path} of type {here[0]} and shape {here[1]}, and rank {LEADER} {there[0]} "
                f"{there[1]}: all ranks work on the same batch"
            )


def checksums(given: CallArguments) -> dict[str, Tensor | int]:
    """The checksum of each tensor that this rank was given, by path, on the tensor's device."""
    found = {path: checksum(tensor) for path, tensor in tensors_in(given).items()}
    return {path: value for path, value in found.items() if value is not None}


def tensors_in(given: CallArguments) -> dict[str, Tensor]:
    """The tensors among the arguments, by path."""
    args, kwargs, target = given
    named = {**{f"argument {at}": arg for at, arg in enumerate(args)}, **kwargs, "target": target}
    found: dict[str, Tensor] = {}
    for name, value in named.items():
        change(value, found.setdefault, name)
    return found
