"""How a step went, as all ranks agree through the leader: what has failed anywhere, or the numbers of all."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxpipe.errors import FxpipeError, RankError

from .world import LEADER, Lost, World

Numbers = dict[int, tuple[Any, torch.dtype]]  # outputs that are one number, by their places


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


def verdict(world: World, found: Failure | Numbers) -> str | Numbers:
    """What has failed on any rank, or, if nothing has, the numbers of all. `found` is what there is of this rank.
    Raises Lost."""
    if not world.leads:
        world.tell(LEADER, pickle.dumps(found))
        told: str | Numbers = pickle.loads(world.hear(LEADER))
        return told
    heard: list[tuple[int, Failure | Numbers]] = [(LEADER, found)]
    for peer in world.others:
        try:
            heard.append((peer, pickle.loads(world.hear(peer))))
        except Lost as error:
            heard.append((peer, Failure(str(error), False)))
    failures = [(rank, failure) for rank, failure in heard if isinstance(failure, Failure)]
    causes = [f"rank {rank}: {failure.text}" for rank, failure in failures if failure.own]
    causes += [failure.text for _, failure in failures if failure.text and not failure.own]
    if failures:
        told = next(iter(causes), "a rank has failed")
    else:
        told = {at: number for _, numbers in heard if isinstance(numbers, dict) for at, number in numbers.items()}
    for peer in world.others:
        try:
            world.tell(peer, pickle.dumps(told))
        except Lost:
            continue
    return told


def share_value(world: World, value: Any, home: int) -> Any:
    """A tensor, or a number, that one rank has, on all of them. Raises Lost."""
    if world.rank != home:
        found = world.share(None, home)
        return found.to(world.device) if isinstance(found, Tensor) else found
    world.share(value.detach().cpu() if isinstance(value, Tensor) else value, home)
    return value
