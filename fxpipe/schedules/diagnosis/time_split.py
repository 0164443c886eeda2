"""Splits the time of a step, for each device, into computing and what it loses, by what would make the loss go away.

While a device is idle, it waits for a transfer, for a late host, or for another device that computes (see
`idle_causes.py`). Waiting for others has three causes, told apart by simulating the same schedule, without transfers:

    with equal stages               it waits because of the schedule: the bubble
    with the stages as they are     it waits longer: the stages are not equal, imbalance
    with the measured actions       it waits longer still: some are slower than they should be, stragglers

An action should take as long as others of its stage and kind, and a device as much longer than the plan predicts as the
others do. What a straggler computes longer than it should is lost, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from fxpipe.ir.schedule.schedule import Action, Schedule
from fxpipe.ir.timeline import Span, Timeline
from fxpipe.schedules.simulate.simulate import StageCost, simulate

from .idle_causes import COMPUTE, HOST, TRANSFER, WAIT, Piece, Pieces, pieces

PARTS = ("computing", "recomputation", "bubble", "imbalance", "transfers", "host", "stragglers")
SLOW = 1.5  # a device is a straggler if it is this much slower than the others, beside what the plan predicts
PAUSE = 2.0  # an action is one if it takes this much longer than most of its stage and kind


@dataclass(frozen=True)
class TimeSplit:
    """Where the time of a step goes.

    - `seconds`: the time of the step, from its call to its end.
    - `parts`: by device the seconds of "computing", "recomputation", "bubble" (waiting that the schedule makes
      necessary), "imbalance" (waiting because stages are not equal), "transfers" (waiting for values), "host" (waiting
      for the main thread) and "stragglers" (waiting for, or being, a device that is slower than it should be). They add
      up to `seconds`.
    - `blamed`: by part the devices or links that cause it, with their seconds: of "computing" and "recomputation" what
      a device runs, of "stragglers" how much longer than it should, of "transfers" and "host" how long devices wait for
      it. "bubble" and "imbalance" have none.
    - `slowness`: by device its measured computing time divided by the predicted one; empty without a prediction.
    """

    seconds: float
    parts: Mapping[str, Mapping[str, float]]
    blamed: Mapping[str, Mapping[str, float]]
    slowness: Mapping[str, float]

    def mean(self, part: str) -> float:
        """The seconds of a part, the mean of all devices."""
        return sum(own[part] for own in self.parts.values()) / len(self.parts)

    @property
    def largest(self) -> str:
        """The part that costs most, besides computing."""
        return max(PARTS[1:], key=self.mean)


Ran = tuple[str, Action]  # the device, and what it ran
Caused = tuple[str, str, float]  # a part, the device or link that causes it, and the seconds


def split(timeline: Timeline, schedule: Schedule, predicted: Timeline | None = None) -> TimeSplit:
    """Where the time of a step goes.

    - `schedule`: what the step ran, with the `sources` of its stages. Several devices may have run a row: replicas.
    - `predicted`: the timeline that the plan predicts, on the same devices.
    """
    found = pieces(timeline, schedule)
    steady = _without_pauses(timeline)
    slowness = _slowness(timeline, steady, predicted)
    times = slow(slowness)
    usual = {ran: seconds / times.get(ran[0], 1.0) for ran, seconds in steady.items()}  # what each action should take
    idle = _idle(timeline, schedule, usual)
    caused = {device: [one for piece in own for one in _caused(piece, usual)] for device, own in found.items()}
    blamed = _blamed(one for own in caused.values() for one in own)
    delays = {part: sum(blamed[part].values()) for part in ("transfers", "host")}
    parts = {device: _parts(found[device], caused[device], idle[device], delays) for device in timeline.devices}
    start, end = timeline.window
    return TimeSplit(end - start, parts, blamed, slowness)


# What actions should take ---------------------------------------------------------------------------------------------


def _ran(timeline: Timeline) -> dict[Ran, float]:
    """The seconds of each action on each device."""
    return {(span.where, _action(span)): span.seconds for device in timeline.devices for span in timeline.on(device)}


def _action(span: Span) -> Action:
    return Action(span.kind, span.stage, span.micro_batch)


def _without_pauses(timeline: Timeline) -> dict[Ran, float]:
    """The seconds of each action, or, if it took far longer, what most of its stage and kind took on its device."""
    ran = _ran(timeline)
    alike: dict[tuple[str, str, int], list[float]] = {}
    for (device, action), seconds in ran.items():
        alike.setdefault((device, action.kind, action.stage), []).append(seconds)

    def usual(device: str, action: Action, seconds: float) -> float:
        some = alike[device, action.kind, action.stage]
        most = median(some)
        return most if len(some) > 2 and seconds > PAUSE * most else seconds

    return {(device, action): usual(device, action, seconds) for (device, action), seconds in ran.items()}


def _slowness(timeline: Timeline, steady: Mapping[Ran, float], predicted: Timeline | None) -> dict[str, float]:
    """By device, how many times as long as predicted it computes, if its actions take the `steady` seconds."""
    if predicted is None or set(predicted.devices) != set(timeline.devices):
        return {}
    busy = dict(zip(predicted.devices, predicted.busy, strict=True))
    took = dict.fromkeys(timeline.devices, 0.0)
    for (device, _), seconds in steady.items():
        took[device] += seconds
    return {device: took[device] / busy[device] for device in timeline.devices if busy[device] > 0}


def slow(slowness: Mapping[str, float]) -> dict[str, float]:
    """The devices that are stragglers, and how many times as long as the others they take."""
    if not slowness:
        return {}
    others = median_low(slowness.values())
    return {device: one / others for device, one in slowness.items() if others and one > SLOW * others}


# Waiting for others ---------------------------------------------------------------------------------------------------


def _idle(timeline: Timeline, schedule: Schedule, usual: Mapping[Ran, float]) -> dict[str, tuple[float, float, float]]:
    """The seconds that each device would be idle without transfers: if all devices had equally much to compute, if
    actions took what they should, and if they take what they do."""
    as_it_is, as_it_should = _slowest(_ran(timeline)), _slowest(usual)
    row_of = {stage: row for row, stages in enumerate(schedule.stages) for stage in stages}
    work = [0.0] * len(schedule.devices)
    for action, seconds in as_it_should.items():
        work[row_of[action.stage]] += seconds
    mean = sum(work) / max(1, len(work))
    equal = {action: seconds * mean / (work[row_of[action.stage]] or 1) for action, seconds in as_it_should.items()}
    idle = [_simulated(schedule, times) for times in (equal, as_it_should, as_it_is)]
    found = dict.fromkeys(timeline.devices, (0.0, 0.0, 0.0))
    for device, action in usual:
        row = row_of[action.stage]
        found[device] = idle[0][row], idle[1][row], idle[2][row]
    return found


def _slowest(times: Mapping[Ran, float]) -> dict[Action, float]:
    """The seconds of each action: replicas go on together, when the slowest is done."""
    found: dict[Action, float] = {}
    for (_, action), seconds in times.items():
        found[action] = max(seconds, found.get(action, 0.0))
    return found


def _simulated(schedule: Schedule, times: Mapping[Action, float]) -> Sequence[float]:
    """The idle seconds of each row, if actions take these times and nothing else takes any."""
    nothing = StageCost(0.0, 0.0, checkpoint="always")  # so that recomputations take what `times` says, too
    return simulate(schedule, [nothing] * schedule.num_stages, took=times).idle


# The parts ------------------------------------------------------------------------------------------------------------


def _caused(piece: Piece, usual: Mapping[Ran, float]) -> Iterator[Caused]:
    """What is known of a piece by itself: all but what waiting for others is for."""
    if piece.cause == COMPUTE and piece.span is not None:
        should = min(piece.seconds, usual[piece.by, _action(piece.span)])
        yield "recomputation" if piece.span.kind == "R" else "computing", piece.by, should
        yield "stragglers", piece.by, piece.seconds - should
    elif piece.cause in (TRANSFER, HOST):
        yield "transfers" if piece.cause == TRANSFER else "host", piece.by, piece.seconds


def _blamed(caused: Iterable[Caused]) -> dict[str, dict[str, float]]:
    """For each part, the devices or links that cause it, and how many seconds each costs."""
    blamed: dict[str, dict[str, float]] = {part: {} for part in PARTS}
    for part, by, seconds in caused:
        blamed[part][by] = blamed[part].get(by, 0.0) + seconds
    return blamed


def _parts(
    found: Pieces, caused: Iterable[Caused], idle: tuple[float, float, float], delays: Mapping[str, float]
) -> dict[str, float]:
    """The seconds of each part, of a device. `delays`: the seconds of transfers and host that any device waits for."""
    parts = dict.fromkeys(PARTS, 0.0)
    for part, _, seconds in caused:
        parts[part] += seconds
    waited = sum(piece.seconds for piece in found if piece.cause == WAIT)
    equal, as_it_should, as_it_is = idle
    unequal, late = max(0.0, as_it_should - equal), max(0.0, as_it_is - max(equal, as_it_should))
    # Actions that transfers and hosts delay are also waited for when they run at last.
    shifted = max(0.0, waited - equal - unequal - late) if sum(delays.values()) else 0.0
    parts["bubble"] = bubble = waited - shifted if unequal + late == 0 else min(waited - shifted, equal)
    for part, share in (("imbalance", unequal), ("stragglers", late)):
        parts[part] += (waited - shifted - bubble) * share / (unequal + late) if share else 0.0
    for part, share in delays.items():
        parts[part] += shifted * share / sum(delays.values()) if share else 0.0
    return parts
