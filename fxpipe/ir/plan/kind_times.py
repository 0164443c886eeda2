"""Times on kinds of devices: what the parts of a model (ops, layers) take on devices other than the one that a profile
or a chain is for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class KindTimes:
    """Seconds of each part of a model on one kind of device.

    - `kind`: the label of a device, or its part before the colon: "K80" stands for "K80:0", "K80:1" and so on.
    - `forwards`, `backwards`: for each op of a profile, or layer of a chain.
    """

    kind: str
    forwards: tuple[float, ...]
    backwards: tuple[float, ...]


def kind_of(label: str, kinds: Collection[KindTimes]) -> str:
    """The kind of `kinds` that a device is of; "" if there is none."""
    known = {one.kind for one in kinds}
    return next((name for name in (label, label.rpartition(":")[0]) if name in known), "")


def check_kinds(model: str, kinds: Collection[KindTimes], parts: str, count: int) -> None:
    """Raise ValueError for kinds of a name that comes twice, or without a possible time for each of the `count` parts
    of a model; `parts` says what these are."""
    for one in kinds:
        if not len(one.forwards) == len(one.backwards) == count:
            raise ValueError(f"the times of {model} on {one.kind} are not for its {count} {parts}")
        if not all(0 <= seconds < float("inf") for seconds in one.forwards + one.backwards):
            raise ValueError(f"the times of {model} on {one.kind} have one that cannot be: {one}")
    if len({one.kind for one in kinds} | {""}) <= len(kinds):
        raise ValueError(f"the kinds of {model} are {[one.kind for one in kinds]}: each has one name")
