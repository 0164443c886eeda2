"""When each stage runs: per device a row of actions, such as "forward of micro-batch 0", in the order they run.

Elsewhere a schedule is a class whose methods send, receive and compute, and one has to run it to see it. Here it is a
value that needs no model and no device: it prints as a grid and parses back, is checked for completeness, order and
deadlock, and tells its bubble and its memory before anything runs.

    gpipe: 2 stages, 3 micro-batches
    clock      0   1   2   3   4   5   6   7
    device 0  F0  F1  F2          B2  B1  B0
    device 1      F0  F1  F2  B2  B1  B0

A row says only the order. The columns are derived: each action stands at the first clock at which its device is free
and what it needs is done, all actions being one clock long. What an action needs (s stage, i micro-batch):

    F(s, i)   forward           F(s - 1, i)
    B(s, i)   backward          F(s, i) and B(s + 1, i), or I(s + 1, i)
    I(s, i)   input gradient    as B: the half of it that the stage before waits for
    W(s, i)   weight gradient   I(s, i): the half that nobody waits for

Stages are a chain unless `sources` says which others each one takes from: then F and B wait for these.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from .units import count

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Action(NamedTuple):
    """What a device does next: `kind` (F, B, I or W) of a stage for a micro-batch. A tuple, because schedules of a
    search hold very many of them and tuples hash fastest.

    >>> print(Action("F", 2, 0))
    2F0
    >>> Action("F", 2, 0).short
    'F0'
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def short(self) -> str:
        """Without the stage, for a device that has only one."""
        return f"{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """A name, and for each device its actions in order. `sources`: of each stage those before it that it takes from, if
    they are not a chain."""

    name: str
    devices: tuple[tuple[Action, ...], ...]
    sources: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        return show(self)

    @cached_property
    def place(self) -> dict[Action, tuple[int, int]]:
        """For every action its device and its position there."""
        return {a: (d, at) for d, row in enumerate(self.devices) for at, a in enumerate(row)}

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Per device the stages it runs, ascending."""
        return tuple(tuple(sorted({action.stage for action in row})) for row in self.devices)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Of each stage those that take from it."""
        return tuple(
            tuple(user for user, sources in enumerate(self.sources) if stage in sources)
            for stage in range(self.num_stages)
        )

    @cached_property
    def num_stages(self) -> int:
        return 1 + max((stage for stages in self.stages for stage in stages), default=-1)

    @cached_property
    def chunks(self) -> int:
        """The number of micro-batches."""
        return 1 + max((action.micro_batch for action in self.place), default=-1)


def needs(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    """The actions that must be done before this one can start."""
    kind, s, i = action
    if kind == "W":
        return (Action("I", s, i),)
    if kind == "F":
        sources = schedule.sources[s] if schedule.sources else range(max(s - 1, 0), s)
        return tuple(Action("F", source, i) for source in sources)
    users = schedule.users[s] if schedule.sources else range(s + 1, min(s + 2, schedule.num_stages))
    gradients = (Action("I", user, i) for user in users)
    return Action("F", s, i), *(g if g in schedule.place else g._replace(kind="B") for g in gradients)


def at_once(schedule: Schedule, stage: int, micro_batch: int) -> bool:
    """Whether backward follows forward on the device without anything between, so that there is nothing to gain by
    computing it again."""
    device, position = schedule.place[Action("F", stage, micro_batch)]
    follows = schedule.devices[device][position + 1 : position + 2]
    return follows in ((Action("B", stage, micro_batch),), (Action("I", stage, micro_batch),))


# Running a schedule in the mind ---------------------------------------------------------------------------------


class Stuck(NamedTuple):
    """A device that waits for ever: it stands at `position`, waiting for the action `missing`."""

    device: int
    position: int
    missing: Action


def order(schedule: Schedule) -> tuple[tuple[Action, ...], tuple[Stuck, ...]]:
    """All actions in one order in which they can run, and the devices that get stuck on the way, if any.

    Each device runs until it waits; it is looked at again when what it waits for is done. So every action is looked at
    a fixed number of times, however many devices there are.
    """
    position = [0] * len(schedule.devices)
    done: dict[Action, None] = {}
    waiting: dict[Action, list[int]] = {}
    awake = deque(range(len(schedule.devices)))
    while awake:
        device = awake.popleft()
        row = schedule.devices[device]
        while position[device] < len(row):
            action = row[position[device]]
            missing = next((need for need in needs(schedule, action) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(device)
                break
            done[action] = None
            position[device] += 1
            awake.extend(waiting.pop(action, ()))
    stuck = (Stuck(device, position[device], need) for need, devices in waiting.items() for device in devices)
    return tuple(done), tuple(sorted(stuck))


class Costs(NamedTuple):
    """How long each kind of action takes, in any unit; all stages alike."""

    forward: float = 1
    backward: float = 2
    input_gradient: float = 1
    weight_gradient: float = 1

    def of(self, kind: str) -> float:
        return self["FBIW".index(kind)]


def starts(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """When each action starts if stages are alike and moving values takes no time."""
    free: list[float] = [0] * len(schedule.devices)
    start: dict[Action, float] = {}
    for action in order(schedule)[0]:
        device, _ = schedule.place[action]
        ready = (start[need] + costs.of(need.kind) for need in needs(schedule, action))
        start[action] = max(free[device], *ready, 0)
        free[device] = start[action] + costs.of(action.kind)
    return start


def bubble(
    schedule: Schedule,
    forward: float = 1,
    backward: float = 2,
    input_gradient: float = 1,
    weight_gradient: float = 1,
) -> float:
    """The share of the devices' time that is idle, if stages are alike and moving values takes no time."""
    costs = Costs(forward, backward, input_gradient, weight_gradient)
    end = max((start + costs.of(action.kind) for action, start in starts(schedule, costs).items()), default=0)
    busy = sum(costs.of(action.kind) for action in schedule.place)
    return 1 - busy / (end * len(schedule.devices)) if end else 0.0


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """Per device the most (stage, micro-batch) pairs whose activations it keeps at once: from the forward until the
    backward, or until both its halves, are done. A forward without a backward keeps nothing."""
    return tuple(max(_live(schedule, row), default=0) for row in schedule.devices)


def _live(schedule: Schedule, row: Sequence[Action]) -> Iterator[int]:
    halves = {"B": 1, "I": 2, "W": 2}
    live: dict[tuple[int, int], int] = {}
    for kind, *task in row:
        key = (task[0], task[1])
        if kind != "F":
            live[key] = live.get(key, 0) + 1
            if live[key] == halves[kind]:
                del live[key]
        elif Action("B", *key) in schedule.place or Action("W", *key) in schedule.place:
            live[key] = 0
        yield len(live)


def share(schedule: Schedule, devices: Sequence[str]) -> Schedule:
    """The schedule with one row for all rows that `devices` gives the same name, in order of first appearance: their
    actions by clock. What stands at one clock does not depend on each other, so the result runs if `schedule` does.

    >>> print(share(parse("F0 F1 . . B1 B0 \\n . F0 F1 B1 B0", name="gpipe"), ("cuda:0", "cuda:0")))
    gpipe: 2 stages, 2 micro-batches
    clock       0    1    2    3    4    5    6    7
    device 0  0F0  0F1  1F0  1F1  1B1  0B1  1B0  0B0
    """
    rows: dict[str, list[tuple[int, Action]]] = {name: [] for name in devices}
    for name, column, row in zip(devices, clocks(schedule), schedule.devices, strict=True):
        rows[name] += zip(column, row, strict=True)
    merged = (sorted(row, key=lambda cell: (cell[0], cell[1].stage)) for row in rows.values())
    return replace(schedule, devices=tuple(tuple(action for _, action in row) for row in merged))


def only(schedule: Schedule, chunks: int) -> Schedule:
    """The schedule without the micro-batches from number `chunks` on, for a batch too small for all of them. It runs if
    `schedule` does, because no action needs one of another micro-batch.

    >>> print(only(parse("F0 F1 . B0 F2 B1 . B2 \\n . F0 B0 F1 B1 F2 B2", name="1f1b"), chunks=2))
    1f1b: 2 stages, 2 micro-batches
    clock      0   1   2   3   4   5
    device 0  F0  F1      B0      B1
    device 1      F0  B0  F1  B1
    """
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}; a schedule needs at least one")
    rows = (tuple(action for action in row if action.micro_batch < chunks) for row in schedule.devices)
    return replace(schedule, devices=tuple(rows))


# The checker ----------------------------------------------------------------------------------------------------


def check(schedule: Schedule) -> None:
    """Raise ValueError, with the place marked in the grid, if the schedule is not complete (every stage runs every
    micro-batch forward, and backward once, in one piece or two; or none at all backward), not ordered (a backward
    before its forward) or deadlocks."""
    fault = next(chain(_misplaced(schedule), _missing(schedule), _disordered(schedule), _deadlocked(schedule)), None)
    if fault is not None:
        device, position, reason = fault
        grid = show(schedule, mark=(device, position, reason))
        raise ValueError(f"the schedule {schedule.name!r} cannot run: device {device}: {reason}\n{grid}")


Fault = tuple[int, int, str]  # device, position in its row, reason


def _misplaced(schedule: Schedule) -> Iterator[Fault]:
    """Actions of no known kind, that stand twice, or whose stage is on two devices."""
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


def _missing(schedule: Schedule) -> Iterator[Fault]:
    """Forwards and backwards that are not there, or there in one piece and in two."""
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


def _disordered(schedule: Schedule) -> Iterator[Fault]:
    """Actions that need one which stands later on the same device."""
    for action, (device, position) in schedule.place.items():
        for need in needs(schedule, action):
            if schedule.place[need] > (device, position) and schedule.place[need][0] == device:
                yield device, position, f"{_name(action)} stands before {_name(need)}, which it needs"


def _deadlocked(schedule: Schedule) -> Iterator[Fault]:
    for device, position, missing in order(schedule)[1]:
        action, other = schedule.devices[device][position], schedule.place[missing][0]
        yield device, position, f"{_name(action)} waits for {_name(missing)} on device {other}, which never comes"


def _name(action: Action) -> str:
    return f"{action.short} of stage {action.stage}"


# The printer and the parsers ------------------------------------------------------------------------------------


def plain(schedule: Schedule) -> bool:
    """Whether device d runs stage d and nothing else, so that actions print without their stage."""
    return schedule.stages == tuple((device,) for device in range(len(schedule.devices)))


def clocks(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Per device the clock of each of its actions, all actions being one clock long. Actions that never run, because
    the schedule is stuck, follow what came before them without a gap."""
    start = starts(schedule, Costs(1, 1, 1, 1))
    columns: list[tuple[int, ...]] = []
    for device, row in enumerate(schedule.devices):
        column: list[int] = []
        for position, action in enumerate(row):
            here = schedule.place[action] == (device, position)  # and not the second of two that are the same
            after = column[-1] + 1 if column else 0
            column.append(max(after, int(start.get(action, 0)) if here else 0))
        columns.append(tuple(column))
    return tuple(columns)


def show(schedule: Schedule, labels: Sequence[str] = (), mark: Fault | None = None) -> str:
    """The grid: a row per device, a column per clock. `labels` are the devices' names; `mark` puts a marker and a
    remark under one action."""
    names = list(labels) or [f"device {device}" for device in range(len(schedule.devices))]
    cells = _cells(schedule)
    last = max((max(row, default=-1) for row in cells), default=-1)
    width = max((len(text) for row in cells for text in row.values()), default=1)
    left = max(len(name) for name in [*names, "clock"])
    lines = [_title(schedule), _line("clock", left, {c: str(c) for c in range(last + 1)}, width)]
    for device, (name, row) in enumerate(zip(names, cells, strict=True)):
        lines.append(_line(name, left, row, width))
        if mark is not None and mark[0] == device:
            clock = ([*row, max(row, default=-1) + 1])[mark[1]]
            lines.append(_line("", left, {clock: "^" * width}, width) + f" {mark[2]}")
    return "\n".join(lines)


def _title(schedule: Schedule) -> str:
    stages = count(schedule.num_stages, "stage", "stages")
    return f"{schedule.name}: {stages}, {count(schedule.chunks, 'micro-batch', 'micro-batches')}"


def _cells(schedule: Schedule) -> list[dict[int, str]]:
    """Per device the text at each clock."""
    bare = plain(schedule)
    return [
        {clock: action.short if bare else str(action) for clock, action in zip(column, row, strict=True)}
        for column, row in zip(clocks(schedule), schedule.devices, strict=True)
    ]


def _line(name: str, left: int, row: dict[int, str], width: int) -> str:
    end = max(row, default=-1) + 1
    return (name.ljust(left) + "".join(f"  {row.get(clock, ''):>{width}}" for clock in range(end))).rstrip()


_TITLE = re.compile(r"\s*(\S.*?): \d+ stages?, \d+ micro-batch(es)?\s*")
_LABEL = re.compile(r"\s*(device \d+\b:?|[^\s:]+:\S*)")
_ACTION = re.compile(r"(\d*)([FBIW])(\d+)")


def parse(text: str, name: str = "by hand") -> Schedule:
    """The schedule of a grid, as `show` prints it or shorter: title, clocks, the devices' names and the alignment may
    be left out. A cell without a stage is of the stage of its row's number. A dot is an idle clock.

    >>> print(parse("F0 F1 B0 B1 \\n F0 B0 F1 B1", name="early"))
    early: 2 stages, 2 micro-batches
    clock      0   1   2   3   4   5
    device 0  F0  F1      B0      B1
    device 1      F0  B0  F1  B1
    """
    rows: list[list[str]] = []
    for line in text.splitlines():
        if title := _TITLE.fullmatch(line):
            name = title[1]
        elif line.strip() and not re.match(r"\s*clock\b", line):
            rows.append(_LABEL.sub("", line, count=1).split())
    return _schedule(name, rows)


def dump_csv(schedule: Schedule) -> str:
    """A line per device, a column per clock, every action with its stage; `load_csv` reads it back."""
    at = [
        dict(zip(column, map(str, row), strict=True))
        for column, row in zip(clocks(schedule), schedule.devices, strict=True)
    ]
    return "".join(",".join(row.get(clock, "") for clock in range(max(row, default=-1) + 1)) + "\n" for row in at)


def load_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule of a CSV file. Idle clocks are empty cells, or left out."""
    return _schedule(name, [[cell.strip() for cell in line.split(",") if cell.strip()] for line in text.splitlines()])


def _schedule(name: str, rows: list[list[str]]) -> Schedule:
    matches = [[(cell, _ACTION.fullmatch(cell)) for cell in row if cell != "."] for row in rows]
    numbered = {bool(match[1]) for row in matches for _, match in row if match}
    devices: list[tuple[Action, ...]] = []
    for device, row in enumerate(matches):
        actions: list[Action] = []
        for cell, match in row:
            if match is None:
                raise ValueError(f"device {device}: {cell!r} is not an action; write F0, or 2F0 with the stage")
            if len(numbered) > 1 and not match[1]:
                raise ValueError(f"device {device}: {cell!r} has no stage, as others have; write {device}{cell}")
            actions.append(Action(match[2], int(match[1] or device), int(match[3])))
        devices.append(tuple(actions))
    return Schedule(name, tuple(devices))
