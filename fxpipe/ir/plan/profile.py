"""What each op of a model costs, for one micro-batch on one device: measured or estimated, in the same form.

UNet, measured on cuda:0, batch 8
op        forward  backward  saved   output  parameters
conv      1.2 ms   2.3 ms    98 kB   2.1 MB  576 B
relu      90 us    110 us    2.1 MB  2.1 MB  0 B
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated

from tabulate import tabulate

from fxpipe.ir.dataclass_json import at_least, one_of, read, write
from fxpipe.ir.units import show_bytes, show_seconds

SOURCES = ("measured", "estimated")


@dataclass(frozen=True, slots=True)
class OpCost:
    """The cost of the op `name`.

    - `forward`, `backward`: seconds.
    - `saved`: bytes that autograd keeps from its forward to its backward. Each piece of memory is counted once, at the
      first op that keeps it, and parameters never.
    - `output`: bytes of its result.
    - `parameters`: bytes of the parameters that it is the first to use.
    """

    name: str
    forward: float = 0.0
    backward: float = 0.0
    saved: int = 0
    output: int = 0
    parameters: int = 0


@dataclass(frozen=True)
class Profile:
    """The costs of all ops of `model`, in graph order, taken at `batch` samples on `device`; `source` is "measured" or
    "estimated". Check with `check`, print with `str`."""

    model: str
    batch: Annotated[int, at_least(1)]
    device: str
    source: Annotated[str, one_of(*SOURCES)]
    ops: tuple[OpCost, ...]

    def __str__(self) -> str:
        return show(self)


def check(profile: Profile, ops: Sequence[str]) -> None:
    """Raise ValueError if the profile is not one for a graph of these ops, in this order, or has impossible costs."""
    if profile.source not in SOURCES:
        raise ValueError(f"the profile is {profile.source!r}, not one of {SOURCES}")
    if profile.batch < 1:
        raise ValueError(f"the profile was taken at a batch of {profile.batch}")
    for cost in profile.ops:
        figures = (cost.forward, cost.backward, cost.saved, cost.output, cost.parameters)
        if not all(value >= 0 for value in figures):  # not (>= 0) rather than (< 0): NaN is refused too
            raise ValueError(f"op {cost.name!r} has a cost below zero: {cost}")
    names = [cost.name for cost in profile.ops]
    if names != list(ops):
        at = next((p for p, (a, b) in enumerate(zip(names, ops, strict=False)) if a != b), min(len(names), len(ops)))
        here, there = names[at : at + 1] or ["nothing"], list(ops[at : at + 1]) or ["nothing"]
        raise ValueError(
            f"the profile is for another model: it has {len(names)} ops, the model {len(ops)}; "
            f"the first difference is at op {at}, {here[0]} in the profile and {there[0]} in the model"
        )


def show(profile: Profile) -> str:
    """A table, one op per line, with the sums below."""
    head = f"{profile.model}, {profile.source} on {profile.device}, batch {profile.batch}"
    rows = [_row(cost) for cost in (*profile.ops, total(profile.ops))]
    return f"{head}\n" + tabulate(rows, [field.name for field in fields(OpCost)], tablefmt="plain")


def _row(cost: OpCost) -> tuple[str, ...]:
    times = map(show_seconds, (cost.forward, cost.backward))
    return (cost.name, *times, *map(show_bytes, (cost.saved, cost.output, cost.parameters)))


def total(costs: Sequence[OpCost], name: str = "total") -> OpCost:
    """The sum of costs."""
    return OpCost(
        name,
        forward=sum(cost.forward for cost in costs),
        backward=sum(cost.backward for cost in costs),
        saved=sum(cost.saved for cost in costs),
        output=sum(cost.output for cost in costs),
        parameters=sum(cost.parameters for cost in costs),
    )


def dump(profile: Profile) -> str:
    """The profile as JSON text, one op per line; `load` reads it back."""
    return write({one.name: getattr(profile, one.name) for one in fields(Profile)})  # without the fields of a subclass


def load(text: str) -> Profile:
    """The profile that `dump` wrote. Raises ValueError for text that is not one."""
    return read(Profile, text)
