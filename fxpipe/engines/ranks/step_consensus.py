"""The verdict of a step, the same on all ranks: the first failure anywhere, or the numbers of all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import FxpipeError, RankError

from .failure_attribution import Lost
from .input_checksums import Checksums, differing
from .rank_group import World

Numbers = dict[int, tuple[Any, torch.dtype]]  # by output index, an output that is one number, or a share of it


def describe(error: BaseException | None) -> str:
    """The text of an error for other ranks; empty for None: another rank failed first."""
    if error is None:
        return ""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    name = "" if isinstance(error, FxpipeError) else f"{type(error).__name__}: "
    return f"{name}{error}{notes}"


@dataclass(frozen=True)
class Failure:
    """The failure of a rank. `own`: it began on this rank. Else another rank is lost, or failed first, and then `text`
    is empty."""

    text: str
    own: bool

    @staticmethod
    def of(error: BaseException | None) -> Failure:
        return Failure(describe(error), error is not None and not isinstance(error, RankError))


def consensus(world: World, found: Failure | Numbers, inputs: Checksums | None = None) -> str | Numbers:
    """What has failed on any rank, or, if nothing has, the sums of the numbers of all ranks. `found`: the failure or
    the numbers of this rank; `inputs`: the checksums of what it was given, which must not differ. Each rank sends its
    own to all others, so none waits for another's conclusion, and all reach the same one."""
    heard, data = {world.rank: found}, pickle.dumps((found, inputs or {}))
    given = {world.rank: inputs or {}}
    for peer in world.others:
        try:
            world.begin_to_tell(peer, data)
        except Lost as error:
            heard[peer] = Failure(str(error), False)
    for peer in world.others:
        try:
            heard[peer], given[peer] = pickle.loads(world.hear(peer))
        except Lost as error:
            heard[peer] = Failure(str(error), False)
    for peer in world.others:  # ranks receive before they finish their sends, so this does not hang
        try:
            world.told(peer)
        except Lost as error:
            heard[peer] = Failure(str(error), False)
    # Failures with a note of the missing message come first.
    heard = dict(
        sorted(heard.items(), key=lambda one: (isinstance(one[1], Failure) and "\n" not in one[1].text, one[0]))
    )
    failures = [(rank, failure) for rank, failure in heard.items() if isinstance(failure, Failure)]
    causes = [f"rank {rank}: {failure.text}" for rank, failure in failures if failure.own]
    causes += [failure.text for _, failure in failures if failure.text and not failure.own]
    if failures:
        return next(iter(causes), "a rank has failed")
    return differing(given) or added(numbers for numbers in heard.values() if isinstance(numbers, dict))


def added(shares: Iterable[Numbers]) -> Numbers:
    """The sum of each number's shares.

    >>> added([{0: (1.5, torch.float32)}, {}, {0: (2.0, torch.float32)}])
    {0: (3.5, torch.float32)}
    """
    found: Numbers = {}
    for numbers in shares:
        for at, (number, dtype) in numbers.items():
            found[at] = (found[at][0] + number if at in found else number), dtype
    return found


def broadcast_value(world: World, value: Any, home: int) -> Any:
    """Give all ranks a tensor or number of rank `home`; tensors arrive on each rank's device. Raises Lost."""
    if world.rank != home:
        found = world.broadcast(None, home)
        return found.to(world.device) if isinstance(found, Tensor) else found
    world.broadcast(value.detach().cpu() if isinstance(value, Tensor) else value, home)
    return value
