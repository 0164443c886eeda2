"""When each stage runs: per device a row of actions, such as "forward of micro-batch 0", in the order they run.

A schedule is a value that needs no model and no device: it prints as a grid and parses back, and `schedule_check.py`
checks it before anything runs.

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

Stages are a chain, unless `sources` says from which others each one takes: then F waits for all sources of s, and B
for all stages of which s is a source.

`F2+ B0` is an overlapped pair: a forward and the backward of another micro-batch that run as one action. It starts when
what both need is done, and is done when both are.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from fxpipe.ir.drawable import Drawable
from fxpipe.ir.units import count

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Action(NamedTuple):
    """`kind` (F, B, I or W) of a stage for a micro-batch. A tuple, because tuples hash fastest and a search over
    schedules holds very many actions.

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
class Schedule(Drawable):
    """The order of each device's actions. Print with `str`.

    - `name`: of the schedule.
    - `devices`: for each device, its actions in order: (kind, stage, micro-batch), where the kind is "F" (forward), "B"
      (backward), or one of its halves: "I" (gradients of inputs), "W" (of weights).
    - `sources`: for each stage, the earlier stages that it takes values from; empty if the stages are a chain.
    - `pairs`: the forwards that run as one action with the backward that directly follows them in the row.
    """

    name: str
    devices: tuple[tuple[Action, ...], ...]
    sources: tuple[tuple[int, ...], ...] = ()
    pairs: frozenset[Action] = frozenset()

    def __str__(self) -> str:
        return show(self)

    __repr__ = __str__  # what a notebook's cell or the interpreter shows

    @cached_property
    def place(self) -> dict[Action, tuple[int, int]]:
        """For each action the number of its device, and its position in that row."""
        return {a: (d, at) for d, row in enumerate(self.devices) for at, a in enumerate(row)}

    @cached_property
    def beside(self) -> dict[Action, Action]:
        """For each forward in a pair the backward beside it."""
        following = {a: b for row in self.devices for a, b in pairwise(row)} if self.pairs else {}
        return {forward: following[forward] for forward in self.pairs if forward in following}

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Per device the stages it runs, ascending."""
        return tuple(tuple(sorted({action.stage for action in row})) for row in self.devices)

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each stage those that take from it, by `sources`."""
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
    """The actions that must be done before this one can start. For a forward in a pair also what the backward beside it
    needs; and a pair is done when its backward is."""
    beside = schedule.beside
    if not beside:
        return _own_needs(schedule, action)
    both = (action, beside[action]) if action in beside else (action,)
    found = dict.fromkeys(need for one in both for need in _own_needs(schedule, one))
    return tuple(dict.fromkeys(beside.get(need, need) for need in found))


def _own_needs(schedule: Schedule, action: Action) -> tuple[Action, ...]:
    kind, s, i = action
    if kind == "W":
        return (Action("I", s, i),)
    if kind == "F":
        sources = schedule.sources[s] if schedule.sources else range(max(s - 1, 0), s)
        return tuple(Action("F", source, i) for source in sources)
    users = schedule.users[s] if schedule.sources else range(s + 1, min(s + 2, schedule.num_stages))
    gradients = (Action("I", user, i) for user in users)
    return Action("F", s, i), *(g if g in schedule.place else g._replace(kind="B") for g in gradients)


def partners(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """The stages whose backward some forward of this stage is in a pair with, ascending."""
    return tuple(sorted({other.stage for one, other in schedule.beside.items() if one.stage == stage}))


def at_once(schedule: Schedule, stage: int, micro_batch: int) -> bool:
    """Whether this backward directly follows its forward on the device, so that recomputation would save no memory."""
    device, position = schedule.place[Action("F", stage, micro_batch)]
    follows = schedule.devices[device][position + 1 : position + 2]
    return follows in ((Action("B", stage, micro_batch),), (Action("I", stage, micro_batch),))


# Order and start times ------------------------------------------------------------------------------------------


class Stuck(NamedTuple):
    """A device that waits for ever: it stands at `position`, waiting for the action `missing`."""

    device: int
    position: int
    missing: Action


def order(schedule: Schedule) -> tuple[tuple[Action, ...], tuple[Stuck, ...]]:
    """All actions in one order in which they can run, and the devices that get stuck on the way, if any.

    Actions of a kind follow each other as long as any can run, those of one device first: on one thread, each change
    between forward and backward costs time, as other code comes into the processor's caches. A device is looked at
    again when the action that it waits for is done, so the work for an action does not grow with the number of devices.
    """
    position = [0] * len(schedule.devices)
    done: dict[Action, None] = {}
    waiting: dict[Action, list[int]] = {}
    able: dict[str, deque[int]] = {kind: deque() for kind in "BIWF"}  # devices, by the kind of their next action

    def find(device: int, soon: bool = False) -> None:
        """Note what the device can do next, or what it waits for."""
        row = schedule.devices[device]
        if position[device] < len(row):
            action = row[position[device]]
            missing = next((need for need in needs(schedule, action) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(device)
            elif soon:
                able[action.kind].appendleft(device)
            else:
                able[action.kind].append(device)

    for device in range(len(schedule.devices)):
        find(device)
    kind = "F"
    while any(able.values()):
        if not able[kind]:
            kind = next(kind for kind in able if able[kind])
        device = able[kind].popleft()
        row, start = schedule.devices[device], position[device]
        ran = row[start : start + 1 + (row[start] in schedule.beside)]  # the second of a pair follows the first
        done.update(dict.fromkeys(ran))
        position[device] += len(ran)
        find(device, soon=True)
        for action in ran:
            for other in waiting.pop(action, ()):
                find(other)
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
            here = schedule.place[action] == (device, position)  # not the second of two equal actions
            after = column[-1] + 1 if column else 0
            column.append(max(after, int(start.get(action, 0)) if here else 0))
        columns.append(tuple(column))
    return tuple(columns)


Mark = tuple[int, int, str]  # device, position in its row, remark


def show(schedule: Schedule, labels: Sequence[str] = (), mark: Mark | None = None) -> str:
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
        {clock: cell(schedule, action, bare) for clock, action in zip(column, row, strict=True)}
        for column, row in zip(clocks(schedule), schedule.devices, strict=True)
    ]


def cell(schedule: Schedule, action: Action, bare: bool = False) -> str:
    """The text of an action, `bare` without its stage. A forward in a pair ends with a +."""
    return (action.short if bare else str(action)) + "+" * (action in schedule.pairs)


def _line(name: str, left: int, row: dict[int, str], width: int) -> str:
    end = max(row, default=-1) + 1
    return (name.ljust(left) + "".join(f"  {row.get(clock, ''):>{width}}" for clock in range(end))).rstrip()


_TITLE = re.compile(r"\s*(\S.*?): \d+ stages?, \d+ micro-batch(es)?\s*")
_LABEL = re.compile(r"\s*(device \d+\b:?|[^\s:]+:\S*)")
_ACTION = re.compile(r"(\d*)([FBIW])(\d+)(\+?)")


def parse(text: str, name: str = "by hand") -> Schedule:
    """The schedule of a grid, as `show` prints it or shorter: title, clocks, the devices' names and the alignment may
    be left out. A cell without a stage has the stage of its row's number. A dot is an idle clock.

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
        dict(zip(column, (cell(schedule, action) for action in row), strict=True))
        for column, row in zip(clocks(schedule), schedule.devices, strict=True)
    ]
    return "".join(",".join(row.get(clock, "") for clock in range(max(row, default=-1) + 1)) + "\n" for row in at)


def load_csv(text: str, name: str = "csv") -> Schedule:
    """The schedule of a CSV file. Idle clocks are empty cells, or left out."""
    return _schedule(name, [[word.strip() for word in line.split(",") if word.strip()] for line in text.splitlines()])


def _schedule(name: str, rows: list[list[str]]) -> Schedule:
    matches = [[(text, _ACTION.fullmatch(text)) for text in row if text != "."] for row in rows]
    numbered = {bool(match[1]) for row in matches for _, match in row if match}
    devices: list[tuple[Action, ...]] = []
    pairs: set[Action] = set()
    for device, row in enumerate(matches):
        actions: list[Action] = []
        for text, match in row:
            if match is None:
                raise ValueError(f"device {device}: {text!r} is not an action; write F0, or 2F0 with the stage")
            if len(numbered) > 1 and not match[1]:
                raise ValueError(f"device {device}: {text!r} has no stage, as others have; write {device}{text}")
            actions.append(Action(match[2], int(match[1] or device), int(match[3])))
            if match[4]:
                pairs.add(actions[-1])
        devices.append(tuple(actions))
    return Schedule(name, tuple(devices), pairs=frozenset(pairs))
