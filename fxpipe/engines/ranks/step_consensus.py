"""How a step went, as all ranks hear from each other: what has failed anywhere, or the numbers of all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import FxpipeError, RankError

from .rank_group import Lost, World

Numbers = dict[int, tuple[Any, torch.dtype]]  # outputs that are one number, or a share of it, by place


def describe(error: BaseException | None) -> str:
    """What others are told of an error; nothing, if another rank has failed before."""
    if error is None:
        return ""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    name = "" if isinstance(error, FxpipeError) else f"{type(error).__name__}: "
    return f"{name}{error}{notes}"


@dataclass(frozen=True)
class Failure:
    """What a rank says of its failure; `own` if it is its own, and not that another one is lost, or has failed before:
    then there is no text."""

    text: str
    own: bool

    @staticmethod
    def of(error: BaseException | None) -> Failure:
        return Failure(describe(error), error is not None and not isinstance(error, RankError))


def consensus(world: World, found: Failure | Numbers) -> str | Numbers:
    """What has failed on any rank, or, if nothing has, the numbers of all. `found` is what there is of this rank: it
    tells all others, so that nobody waits for what another makes of it, and all come to the same."""
    heard, begun, data = {world.rank: found}, list[tuple[int, Any, Tensor]](), pickle.dumps(found)
    for peer in world.others:
        try:
            begun += [(peer, *one) for one in world.begin_to_tell(peer, data)]
        except Lost as error:
            heard[peer] = Failure(str(error), False)
    for peer in world.others:
        try:
            heard[peer] = pickle.loads(world.hear(peer))
        except Lost as error:
            heard[peer] = Failure(str(error), False)
    for peer, work, _ in begun:  # who has told something has heard this
        try:
            world.finish(work, peer)
        except Lost as error:
            heard[peer] = Failure(str(error), False)
    # Those who know what did not come are heard first.
    heard = dict(
        sorted(heard.items(), key=lambda one: (isinstance(one[1], Failure) and "\n" not in one[1].text, one[0]))
    )
    failures = [(rank, failure) for rank, failure in heard.items() if isinstance(failure, Failure)]
    causes = [f"rank {rank}: {failure.text}" for rank, failure in failures if failure.own]
    causes += [failure.text for _, failure in failures if failure.text and not failure.own]
    if failures:
        return next(iter(causes), "a rank has failed")
    return added(numbers for numbers in heard.values() if isinstance(numbers, dict))


def added(shares: Iterable[Numbers]) -> Numbers:
    """The numbers, each the sum of the shares that ranks have of it.

    >>> added([{0: (1.5, torch.float32)}, {}, {0: (2.0, torch.float32)}])
    {0: (3.5, torch.float32)}
    """
    found: Numbers = {}
    for numbers in shares:
        for at, (number, dtype) in numbers.items():
            found[at] = (found[at][0] + number if at in found else number), dtype
    return found


def share_value(world: World, value: Any, home: int) -> Any:
    """A tensor, or a number, that one rank has, on all of them. Raises Lost."""
    if world.rank != home:
        found = world.share(None, home)
        return found.to(world.device) if isinstance(found, Tensor) else found
    world.share(value.detach().cpu() if isinstance(value, Tensor) else value, home)
    return value
