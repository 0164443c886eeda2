"""What each op of a model costs, for one micro-batch on one device: measured or estimated, in the same form.

UNet, measured on cuda:0, batch 8
op        forward  backward  saved   output  parameters
conv      1.2 ms   2.3 ms    98 kB   2.1 MB  576 B
relu      90 us    110 us    2.1 MB  2.1 MB  0 B
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated

from tabulate import tabulate

from fxpipe.ir.dataclass_json import at_least, one_of, read, write
from fxpipe.ir.replica_shares import dealt
from fxpipe.ir.units import show_bytes, show_seconds

from .kind_times import KindTimes, check_kinds, kind_of

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
    """The costs of all ops of a model, for one micro-batch, in seconds and bytes. Print with `str`;
    `fxpipe.ir.plan.profile` has `check`, which raises ValueError for impossible costs, `dump` and `load`.

    - `model`: its name.
    - `batch`: the samples of the micro-batch.
    - `device`: the device that the costs are for.
    - `source`: "measured" or "estimated".
    - `ops`: in graph order.
    - `kinds`: the times on kinds of devices that are faster or slower than `device`.
    """

    model: str
    batch: Annotated[int, at_least(1)]
    device: str
    source: Annotated[str, one_of(*SOURCES)]
    ops: tuple[OpCost, ...]
    kinds: tuple[KindTimes, ...] = field(default=(), kw_only=True)

    def __str__(self) -> str:
        return show(self)

    __repr__ = __str__  # what a notebook's cell or the interpreter shows

    def kind_of(self, label: str) -> str:
        """The name of the entry of `kinds` with the times of this device; "" if these are those of `device`."""
        return kind_of(label, self.kinds)

    def on(self, label: str) -> Mapping[str, OpCost]:
        """The costs of all ops on a device, by name."""
        return self.by_kind[self.kind_of(label)]

    def replicas(self, devices: Sequence[str]) -> list[tuple[Mapping[str, OpCost], float]]:
        """For the devices of a stage's replicas: for each kind of device, the costs of all ops, and the largest share
        of a micro-batch that a device of this kind gets. Devices that get no sample are left out."""
        shares: dict[str, float] = {}
        for device, samples in zip(devices, dealt(self.batch, len(devices)), strict=True):
            kind = self.kind_of(device)
            shares[kind] = max(samples / self.batch, shares.get(kind, 0.0))
        return [(self.by_kind[kind], share) for kind, share in shares.items() if share]

    def first(self, n: int) -> Profile:
        """The profile of the first `n` ops."""
        kinds = (replace(k, forwards=k.forwards[:n], backwards=k.backwards[:n]) for k in self.kinds)
        return replace(self, ops=self.ops[:n], kinds=tuple(kinds))

    @cached_property
    def by_kind(self) -> dict[str, dict[str, OpCost]]:
        """The costs of all ops, by name, on each kind of device; "" is that of `device`."""
        found = {"": {cost.name: cost for cost in self.ops}}
        for one in self.kinds:
            times = zip(self.ops, one.forwards, one.backwards, strict=True)
            found[one.kind] = {cost.name: replace(cost, forward=f, backward=b) for cost, f, b in times}
        return found


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
    check_kinds(profile.model, profile.kinds, "ops", len(profile.ops))
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
    for one in profile.kinds:
        for times in (one.forwards, one.backwards):
            rows = [(*row, show_seconds(t)) for row, t in zip(rows, (*times, sum(times)), strict=True)]
    more = [f"{way} on {one.kind}" for one in profile.kinds for way in ("forward", "backward")]
    return f"{head}\n" + tabulate(rows, [*(field.name for field in fields(OpCost)), *more], tablefmt="plain")


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
    return write(
        Profile(**{one.name: getattr(profile, one.name) for one in fields(Profile)})
    )  # not a subclass's fields


def load(text: str) -> Profile:
    """The profile that `dump` wrote. Raises ValueError for text that is not one."""
    return read(Profile, text)
