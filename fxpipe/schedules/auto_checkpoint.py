"""What each stage recomputes: the fastest choice in which every device stays within its memory; and, where nothing
limits memory, as little as lets no device keep more than with the most of it.

What a device keeps depends on its own row alone: no other device changes the order in which it keeps and frees. So
each device has its own choices that fit. Of these, only the ones that no other one beats in every action matter: a step
never gets shorter because an action takes longer. With one stage on each device one choice is left, the one that
recomputes least; with several, all combinations are tried, but for those whose lower bound is no better than what has
been found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations_with_replacement, product
from math import prod
from typing import NamedTuple

from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.units import show_bytes

from .simulate.simulate import Hop, Reduction, StageCost, recomputes, simulate

MOST_OF_DEVICE = 3**5  # choices of one device that are all looked at
MOST_TRIED = 2000  # simulated steps, after which the best so far is taken


class NothingFits(ValueError):
    """No choice stays within memory. `least`: for each device the bytes of the choice that needs least."""

    def __init__(self, message: str, least: Mapping[str, int]) -> None:
        super().__init__(message)
        self.least = least


Costs = Mapping[int, StageCost]  # of the stages of one device, by stage


class _Choice(NamedTuple):
    """What the stages of one device cost, and how long they take."""

    costs: Costs
    seconds: tuple[float, ...]  # of each stage and micro-batch


def auto_checkpoint(
    schedule: Schedule,
    options: Sequence[Sequence[StageCost]],
    memory: Mapping[str, int],
    devices: Sequence[str],
    hops: Sequence[Hop] = (),
    reductions: Sequence[Reduction] = (),
) -> tuple[StageCost, ...]:
    """For each stage one of its `options`, which differ in what is recomputed: those of the shortest step, as
    simulated, in which every device stays within its `memory`, in bytes. `devices` are names, one per row; `hops` and
    `reductions` as for `simulate`. Raises NothingFits if there is no such choice.

    >>> from fxpipe.schedules.one_f_one_b import gpipe
    >>> modes = [StageCost(1, 2, saved=100, taken=10, checkpoint=mode) for mode in ("never", "except_last", "always")]
    >>> chosen = auto_checkpoint(gpipe(2, 4), [modes, modes], {"a": 400, "b": 399}, ("a", "b"))
    >>> [cost.checkpoint for cost in chosen]
    ['never', 'except_last']
    """
    every = [_combinations(options, stages) for stages in schedule.stages]
    needs = _needs(schedule, devices, every)
    least = {device: min(several) for device, several in zip(devices, needs, strict=True)}
    check_memory(least, memory)
    fitting = [
        _undominated(
            [_choice(schedule, one) for one, need in zip(several, bytes, strict=True) if need <= memory[device]]
        )
        for device, several, bytes in zip(devices, every, needs, strict=True)
    ]
    return _Search(schedule, tuple(devices), hops, reductions, fitting).fastest()


def where_it_saves(
    schedule_of: Callable[[Sequence[StageCost]], Schedule],
    options: Sequence[Sequence[StageCost]],
    devices: Sequence[str],
) -> tuple[StageCost, ...]:
    """For each stage one of its `options`, from the fastest to the one that keeps least: the first with which no device
    needs more memory at its peak than with the last ones everywhere. Of the stages of a device, the last ones come
    first: under most schedules they keep the fewest micro-batches. `schedule_of`: the schedule of a step with such
    costs; `devices` are names, one per row.

    >>> from fxpipe.schedules.one_f_one_b import one_f_one_b
    >>> never = StageCost(1, 2, saved=100, taken=10, keeps_at_once=True)
    >>> modes = [never, replace(never, checkpoint="except_last")]
    >>> chosen = where_it_saves(lambda costs: one_f_one_b(3, 4), [modes] * 3, ("a", "b", "c"))
    >>> [cost.checkpoint for cost in chosen]
    ['except_last', 'never', 'never']
    """

    def costs(places: Sequence[int]) -> tuple[StageCost, ...]:
        return tuple(several[place] for several, place in zip(options, places, strict=True))

    @cache
    def peaks(places: tuple[int, ...]) -> tuple[int, ...]:
        return _peaks(schedule_of(costs(places)), costs(places), devices)

    def fits(places: tuple[int, ...]) -> list[bool]:
        return [peak <= limit for peak, limit in zip(peaks(places), most, strict=True)]

    before: tuple[int, ...] = ()
    places = tuple(len(several) - 1 for several in options)
    rows, most = schedule_of(costs(places)).stages, peaks(places)
    while before != places:  # the schedule may depend on all costs, so what did not fit at first may fit later
        before = places
        for at in range(max(map(len, rows))):
            turn = {sorted(row)[-1 - at]: device for device, row in enumerate(rows) if at < len(row)}
            for place in range(max(places[s] for s in turn)):
                fit = fits(tuple(min(place, now) if s in turn else now for s, now in enumerate(places)))
                less = tuple(min(place, now) if s in turn and fit[turn[s]] else now for s, now in enumerate(places))
                places = less if all(fits(less)) else places
    return costs(places)


def _combinations(options: Sequence[Sequence[StageCost]], stages: Sequence[int]) -> list[Costs]:
    """The choices of the stages of one device. If they are too many, those in which no stage has a later option than
    the stages before it: under most schedules earlier ones keep more micro-batches."""
    if prod(len(options[s]) for s in stages) <= MOST_OF_DEVICE:
        places: Iterable[tuple[int, ...]] = product(*(range(len(options[s])) for s in stages))
    else:
        most = max(len(options[s]) for s in stages)
        places = (place[::-1] for place in combinations_with_replacement(range(most), len(stages)))
    found = ({s: options[s][min(at, len(options[s]) - 1)] for s, at in zip(stages, p, strict=True)} for p in places)
    return list(found)


def _needs(schedule: Schedule, devices: Sequence[str], every: Sequence[Sequence[Costs]]) -> list[list[int]]:
    """The most memory of each device with each of its choices."""
    needs: list[list[int]] = [[] for _ in every]
    for at in range(max(map(len, every))):
        costs = {s: cost for several in every for s, cost in several[min(at, len(several) - 1)].items()}
        for found, peak in zip(needs, _peaks(schedule, [costs[s] for s in range(len(costs))], devices), strict=True):
            found.append(peak)
    return [found[: len(several)] for found, several in zip(needs, every, strict=True)]


def _peaks(schedule: Schedule, costs: Sequence[StageCost], devices: Sequence[str]) -> tuple[int, ...]:
    """The most memory of each device. Actions take some seconds here: what is kept and freed in no time would not
    show."""
    timed = [replace(cost, forward=1.0, backward=2.0) for cost in costs]
    return simulate(schedule, timed, (), devices).high_water


def _choice(schedule: Schedule, costs: Costs) -> _Choice:
    seconds = (
        cost.forward * (2 if recomputes(schedule, cost, s, i) else 1) + cost.backward
        for s, cost in costs.items()
        for i in range(schedule.chunks)
    )
    return _Choice(costs, tuple(seconds))


def _undominated(choices: Sequence[_Choice]) -> list[_Choice]:
    """The choices that none of the others beats in every action, the one of least work first."""
    kept: list[_Choice] = []
    for choice in sorted(choices, key=lambda one: sum(one.seconds)):
        if not any(all(a <= b for a, b in zip(one.seconds, choice.seconds, strict=True)) for one in kept):
            kept.append(choice)
    return kept


class _Search:
    """A search, device by device, for the fastest combination of the devices' choices."""

    def __init__(
        self,
        schedule: Schedule,
        devices: tuple[str, ...],
        hops: Sequence[Hop],
        reductions: Sequence[Reduction],
        choices: Sequence[Sequence[_Choice]],
    ) -> None:
        self.schedule, self.devices, self.hops, self.reductions = schedule, devices, hops, reductions
        self.choices = choices
        self.quickest = [
            {s: min((one.costs[s] for one in several), key=partial(_work, schedule, s)) for s in several[0].costs}
            for several in choices
        ]
        self.tried, self.best = 0, float("inf")
        self.found: tuple[StageCost, ...] = ()

    def fastest(self) -> tuple[StageCost, ...]:
        self._from([several[0].costs for several in self.choices], len(self.choices))
        self._from([], 0)
        return self.found

    def _from(self, chosen: list[Costs], count: int) -> None:
        """Try all that begin with these choices of the first `count` devices."""
        if self.tried >= MOST_TRIED:
            return
        self.tried += 1
        costs = {s: cost for one in (*chosen, *self.quickest[count:]) for s, cost in one.items()}
        every = tuple(costs[s] for s in range(len(costs)))
        bound = simulate(self.schedule, every, self.hops, self.devices, self.reductions).makespan
        if bound >= self.best:
            return
        if count == len(self.choices):
            self.best, self.found = bound, every
            return
        for choice in self.choices[count]:
            self._from([*chosen, choice.costs], count + 1)


def _work(schedule: Schedule, stage: int, cost: StageCost) -> float:
    """The seconds of a stage in a step."""
    return sum(_choice(schedule, {stage: cost}).seconds)


def check_memory(needs: Mapping[str, int], memory: Mapping[str, int]) -> None:
    """Raise NothingFits if a device needs more bytes than it has."""
    lacking = [
        f"{device} needs {need:,} bytes at least and has {memory[device]:,} ({show_bytes(memory[device])})"
        for device, need in needs.items()
        if need > memory[device]
    ]
    if lacking:
        raise NothingFits("; ".join(lacking), needs)
