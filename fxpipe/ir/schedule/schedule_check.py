"""What is wrong with a schedule that cannot run: the first action that is missing or not where it should be, shown in
the grid.

    device 0  B0  F0
              ^^ B0 of stage 0 stands before F0 of stage 0, which it needs
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from .schedule import KINDS, Action, Mark, Schedule, needs, order, show


def check(schedule: Schedule) -> None:
    """Raise ValueError, with the place marked in the grid, if the schedule is not complete (every stage runs every
    micro-batch forward once, and backward once, whole or in two halves, or no stage runs backward), not ordered (a
    backward before its forward) or deadlocks."""
    fault = next(chain(_misplaced(schedule), _missing(schedule), _disordered(schedule), _deadlocked(schedule)), None)
    if fault is not None:
        device, position, reason = fault
        grid = show(schedule, mark=(device, position, reason))
        raise ValueError(f"the schedule {schedule.name!r} cannot run: device {device}: {reason}\n{grid}")


def _misplaced(schedule: Schedule) -> Iterator[Mark]:
    """Actions of no known kind, that stand twice, or whose stage is on two devices; and pairs that are none."""
    home: dict[int, int] = {}
    seen: set[Action] = set()
    for device, row in enumerate(schedule.devices):
        for position, action in enumerate(row):
            if action.kind not in KINDS or action.stage < 0 or action.micro_batch < 0:
                yield device, position, f"{action} is not an action"
            if action in seen:
                yield device, position, f"{_name(action)} stands twice"
            if home.setdefault(action.stage, device) != device:
                yield device, position, f"stage {action.stage} is on device {home[action.stage]} already"
            seen.add(action)
            follows = row[position + 1] if position + 1 < len(row) else action
            paired = (action.kind, follows.kind) == ("F", "B") and action.micro_batch != follows.micro_batch
            if action in schedule.pairs and not paired:
                yield device, position, f"{_name(action)} has no B of another micro-batch behind it, to run as a pair"


def _missing(schedule: Schedule) -> Iterator[Mark]:
    """Forwards and backwards that are missing, and backwards that are there both whole and in halves."""
    trains = any(action.kind != "F" for action in schedule.place)
    home = {stage: device for device, stages in enumerate(schedule.stages) for stage in stages}
    for s in range(schedule.num_stages):
        if s not in home:
            yield 0, len(schedule.devices[0]), f"stage {s} of {schedule.num_stages} is on no device"
            return
        for i in range(schedule.chunks):
            kinds = "".join(kind for kind in KINDS if Action(kind, s, i) in schedule.place)
            whole = kinds in ("FB", "FIW") if trains else kinds == "F"
            if not whole:
                row = schedule.devices[home[s]]
                yield home[s], len(row), _what_is_missing(s, i, kinds)


def _what_is_missing(s: int, i: int, kinds: str) -> str:
    task = f"micro-batch {i} of stage {s}"
    if "F" not in kinds:
        return f"{task} has no forward, F{i}"
    if "B" in kinds:
        return f"{task} goes backward in one piece, B{i}, and in two, I{i} and W{i}"
    if "I" in kinds or "W" in kinds:
        half = "W" if "I" in kinds else "I"
        return f"{task} has no {KINDS[half]}, {half}{i}"
    return f"{task} has no backward, B{i}"


def _disordered(schedule: Schedule) -> Iterator[Mark]:
    """Actions that need a later one of the same device."""
    for action, (device, position) in schedule.place.items():
        for need in needs(schedule, action):
            if schedule.place[need] > (device, position) and schedule.place[need][0] == device:
                yield device, position, f"{_name(action)} stands before {_name(need)}, which it needs"


def _deadlocked(schedule: Schedule) -> Iterator[Mark]:
    for device, position, missing in order(schedule)[1]:
        action, other = schedule.devices[device][position], schedule.place[missing][0]
        yield device, position, f"{_name(action)} waits for {_name(missing)} on device {other}, which never comes"


def _name(action: Action) -> str:
    return f"{action.short} of stage {action.stage}"
