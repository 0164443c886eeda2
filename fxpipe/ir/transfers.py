"""A schedule with its transfers: for each device everything it does, in order, computing, sending and receiving.

A schedule says which stage computes what and when; a program says which values move. Together they leave no choice:

    gpipe on 2 devices
    cuda:0
      run      0F0
      receive  gradient of x[0]  1 -> 0
      send     x[0]  0 -> 1
      run      0B0
    cuda:1
      receive  x[0]  0 -> 1
      run      1F0
      run      1B0
      send     gradient of x[0]  1 -> 0

A send stands after the action that makes the value. A receive stands as early as it helps: where its device is, by the
clocks, when the value is made. Nobody waits there: from then on the value may arrive while the device computes, and the
action that takes it waits until it has. On each pair of devices messages are received in the order in which they are
sent, as channels want it.

Nothing can deadlock, even where a send waits until the receive has been reached. Let a run and the receives after it
count as the moment when the run starts, and a send as the moment when its value is made: whatever waits, waits for
something earlier. (A receive stands before the sends of the run that it follows.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import NamedTuple

from .program import Program
from .schedule import Action, Costs, Schedule, starts
from .schedule import check as check_schedule
from .types import tensors


class Message(NamedTuple):
    """`value` goes from stage `source` to stage `target` for a micro-batch, or once a step if that is None: a tensor of
    the model that is lent. `gradient` if it is not the value that goes, but its gradient, back.

    >>> print(Message("x", 1, 0, micro_batch=3, gradient=True))
    gradient of x[3]  1 -> 0
    """

    value: str
    source: int
    target: int
    micro_batch: int | None = None
    gradient: bool = False

    def __str__(self) -> str:
        what = self.value if self.micro_batch is None else f"{self.value}[{self.micro_batch}]"
        return f"{'gradient of ' * self.gradient}{what}  {self.source} -> {self.target}"


class Step(NamedTuple):
    """One line of a device's list. `do` is "run" an action, "send" or "receive" a message, or "reduce": add the
    gradient that a message brought to the device's own. A run of kind R is a recomputation."""

    do: str
    what: Action | Message

    def __str__(self) -> str:
        return f"{self.do:<7}  {self.what}"


@dataclass(frozen=True)
class DevicePrograms:
    """For each device, by name, everything that it does in a training step, in order."""

    name: str
    devices: tuple[str, ...]
    rows: tuple[tuple[Step, ...], ...]

    def __str__(self) -> str:
        return show(self)


# Making ---------------------------------------------------------------------------------------------------------

START = -1  # a position before all actions of a row
Sends = dict[int, list[Message]]  # what leaves a device after each position of its row
Clocks = dict[Action, float]  # when each action starts, if all are one clock long


def add_transfers(schedule: Schedule, program: Program) -> DevicePrograms:
    """The schedule's rows with all sends and receives that the program's moves and loans need. Raises ValueError if the
    schedule cannot run, or is not one for the program's stages and devices."""
    check_schedule(schedule)
    devices = _devices(schedule, program)
    clock = starts(schedule, Costs(1, 1, 1, 1))
    sends = [_sends(program, row) for row in schedule.devices]
    made = [made for row, leaving in zip(schedule.devices, sends, strict=True) for made in _made(clock, row, leaving)]
    rows = []
    for device, row, leaving in zip(devices, schedule.devices, sends, strict=True):
        arriving = [(at, message) for at, message in made if program.stages[message.target].device == device]
        rows.append(tuple(_row(schedule, program, row, leaving, _receives(clock, row, arriving))))
    return DevicePrograms(schedule.name, devices, tuple(rows))


def _devices(schedule: Schedule, program: Program) -> tuple[str, ...]:
    """The devices' names, a row each."""
    stages: dict[str, list[int]] = {}
    for stage in program.stages:
        stages.setdefault(stage.device, []).append(stage.index)
    if tuple(map(tuple, stages.values())) != schedule.stages:
        there = "; ".join(f"{device} runs the stages {here}" for device, here in stages.items())
        raise ValueError(f"the schedule {schedule.name!r} has rows of the stages {list(schedule.stages)}, but {there}")
    return tuple(stages)


def _sends(program: Program, row: Sequence[Action]) -> Sends:
    """What a device sends: what it lends before all else, values after F, gradients after B or I, and the gradient of
    what it borrows after the last backward of the stage that uses it."""
    mine = {action.stage for action in row}
    last = {action.stage: position for position, action in enumerate(row) if action.kind != "F"}
    sends = {START: [Message(loan.state, loan.home, loan.user) for loan in program.loans if loan.home in mine]}
    for position, (kind, s, i) in enumerate(row):
        sends[position] = here = []
        if kind == "F":
            here += [Message(move.value, s, move.target, i) for move in program.moves if move.source == s]
        if kind in "BI":
            here += [Message(move.value, s, move.source, i, True) for move in program.moves if move.target == s]
        if last.get(s) == position:
            here += [Message(loan.state, s, loan.home, None, True) for loan in program.loans if loan.user == s]
    return {position: [m for m in here if _crosses(program, m)] for position, here in sends.items()}


def _crosses(program: Program, message: Message) -> bool:
    """Whether a message goes from one device to another. The caller's batch, where moves start, and its outputs, where
    they end, are on no device."""
    if not (0 <= message.source < len(program.stages) and 0 <= message.target < len(program.stages)):
        return False
    if message.gradient and not _has_gradient(program, message.value):
        return False
    return program.stages[message.source].device != program.stages[message.target].device


def _has_gradient(program: Program, value: str) -> bool:
    return any(tensor.grad for tensor in tensors(program.types[value]))


def _made(clock: Clocks, row: Sequence[Action], sends: Sends) -> Iterator[tuple[float, Message]]:
    """When a device has made each message, in the order in which it sends them."""
    for position, messages in sends.items():
        at = 0.0 if position == START else clock[row[position]] + 1
        yield from ((at, message) for message in messages)


def _receives(clock: Clocks, row: Sequence[Action], arriving: Sequence[tuple[float, Message]]) -> Sends:
    """At which position a device is when each message has been made; sorting keeps the order on each pair."""
    begins = [clock[action] for action in row]
    receives: Sends = {}
    for at, message in sorted(arriving, key=lambda made: made[0]):
        receives.setdefault(bisect_left(begins, at), []).append(message)
    return receives


def _row(schedule: Schedule, program: Program, row: Sequence[Action], sends: Sends, receives: Sends) -> Iterator[Step]:
    """Everything that a device does. A receive at a position stands before the action there, and before the sends of
    the action before it."""
    for position, action in enumerate([None, *row], start=START):
        if action is not None:
            if action.kind in "BI" and _recomputes(schedule, program, action):
                yield Step("run", action._replace(kind="R"))
            yield Step("run", action)
        yield from (Step("receive", message) for message in receives.get(position + 1, ()))
        yield from (Step("send", message) for message in sends[position])
    if any(action.kind != "F" for action in row):
        mine = {action.stage for action in row}
        yield from (
            Step("reduce", Message(loan.state, loan.user, loan.home, None, True))
            for loan in program.loans
            if loan.home in mine and _has_gradient(program, loan.state)
        )


def _recomputes(schedule: Schedule, program: Program, action: Action) -> bool:
    mode = program.stages[action.stage].checkpoint
    return mode == "always" or (mode == "except_last" and action.micro_batch + 1 < schedule.chunks)


# The checker ----------------------------------------------------------------------------------------------------

Fault = tuple[int, int, str]  # device, position in its row, reason


def check(programs: DevicePrograms) -> None:
    """Raise ValueError, with the place marked, if a message is sent and not received or the other way around, received
    in another order than sent, received after the action that takes it, or if devices wait for each other for ever
    where a send waits until the receive has been reached."""
    faults = (_misplaced, _unmatched, _too_late, _stuck)
    fault = next(chain.from_iterable(find(programs) for find in faults), None)
    if fault is not None:
        device, _, reason = fault
        name = programs.devices[device]
        raise ValueError(f"the programs of {programs.name!r} cannot run: {name}: {reason}\n{_around(programs, fault)}")


def _homes(programs: DevicePrograms) -> dict[int, int]:
    """The device of each stage."""
    return {
        step.what.stage: device
        for device, row in enumerate(programs.rows)
        for step in row
        if isinstance(step.what, Action)
    }


def _messages(row: Sequence[Step], do: str) -> Iterator[tuple[int, Message]]:
    """The messages that a device sends or receives, and at which positions of its row."""
    for position, step in enumerate(row):
        if step.do == do and isinstance(step.what, Message):
            yield position, step.what


def _misplaced(programs: DevicePrograms) -> Iterator[Fault]:
    """Messages of stages that are on no device, or not on this one."""
    homes = _homes(programs)
    for device, row in enumerate(programs.rows):
        for do, here in (("send", "source"), ("receive", "target")):
            for position, message in _messages(row, do):
                for stage in (message.source, message.target):
                    if stage not in homes:
                        yield device, position, f"{message} is for stage {stage}, which no device runs"
                if homes[getattr(message, here)] != device:
                    yield device, position, f"stage {getattr(message, here)}, which {do}s {message}, is not here"


def _unmatched(programs: DevicePrograms) -> Iterator[Fault]:
    """On each pair of devices, where what is received begins to differ from what is sent."""
    homes = _homes(programs)
    pairs: dict[tuple[int, int], tuple[list[_At], list[_At]]] = {}
    for device, row in enumerate(programs.rows):
        for at in _messages(row, "send"):
            pairs.setdefault((device, homes[at[1].target]), ([], []))[0].append(at)
        for at in _messages(row, "receive"):
            pairs.setdefault((homes[at[1].source], device), ([], []))[1].append(at)
    for (source, target), (sent, received) in pairs.items():
        same = sum(1 for _ in takewhile(lambda both: both[0][1] == both[1][1], zip(sent, received, strict=False)))
        sends, receives = sent[same:], received[same:]
        if sends and sends[0][1] not in {message for _, message in receives}:
            yield source, sends[0][0], f"nobody receives {sends[0][1]}"
        elif receives and receives[0][1] not in {message for _, message in sends}:
            yield target, receives[0][0], f"nobody sends {receives[0][1]}"
        elif receives:
            first = f"{programs.devices[source]} sends {sends[0][1]} first"
            yield target, receives[0][0], f"receives {receives[0][1]}, but {first}"


_At = tuple[int, Message]  # a position in a row
_Take = tuple[int, int | None, bool]  # stage, micro-batch, whether a gradient


def _takes(action: Action) -> tuple[_Take, ...]:
    """What an action waits for."""
    kind, s, i = action
    if kind == "F":
        return (s, i, False), (s, None, False)
    return ((s, i, True),) if kind in "BI" else ()


def _take(message: Message) -> _Take:
    return message.target, message.micro_batch, message.gradient


def _too_late(programs: DevicePrograms) -> Iterator[Fault]:
    """Receives that stand after the action that takes what they bring."""
    for device, row in enumerate(programs.rows):
        taken: dict[_Take, Action] = {}
        for position, (do, what) in enumerate(row):
            if do == "run" and isinstance(what, Action):
                taken |= dict.fromkeys(_takes(what), what)
            elif do == "receive" and isinstance(what, Message) and _take(what) in taken:
                yield device, position, f"receives {what} after {taken[_take(what)]}, which takes it"


def _stuck(programs: DevicePrograms) -> Iterator[Fault]:
    """Devices that wait for ever. Each runs until it waits for a message, and again when that has moved on: a send
    waits until the receive has been reached, a run or reduce until the message has been sent."""
    brings = [_brings(row) for row in programs.rows]
    position = [0] * len(programs.rows)
    reached: set[Message] = set()
    arrived: set[Message] = set()
    waiting: dict[Message, list[int]] = {}
    awake = deque(range(len(programs.rows)))
    while awake:
        device = awake.popleft()
        row = programs.rows[device]
        while position[device] < len(row):
            do, what = row[position[device]]
            missing = _missing(do, what, brings[device], reached, arrived)
            if missing is not None:
                waiting.setdefault(missing, []).append(device)
                break
            if isinstance(what, Message) and do in ("send", "receive"):
                (reached if do == "receive" else arrived).add(what)
                awake.extend(waiting.pop(what, ()))
            position[device] += 1
    for message, devices in waiting.items():
        for device in devices:
            yield device, position[device], f"waits for ever for {message}"


def _brings(row: Sequence[Step]) -> dict[_Take, list[Message]]:
    """What a device receives, by who takes it."""
    brings: dict[_Take, list[Message]] = {}
    for _, message in _messages(row, "receive"):
        brings.setdefault(_take(message), []).append(message)
    return brings


def _missing(
    do: str,
    what: Action | Message,
    brings: Mapping[_Take, Sequence[Message]],
    reached: Container[Message],
    arrived: Container[Message],
) -> Message | None:
    """The message that a step waits for, if any."""
    if isinstance(what, Action):
        needed = chain.from_iterable(brings.get(take, ()) for take in _takes(what))
        return next((message for message in needed if message not in arrived), None)
    if do == "send":
        return None if what in reached else what
    here = do == "reduce" and what in brings.get(_take(what), ())
    return what if here and what not in arrived else None


# The printer ----------------------------------------------------------------------------------------------------


def show(programs: DevicePrograms) -> str:
    """A line per step, under each device."""
    count = len(programs.devices)
    lines = [f"{programs.name} on {count} {'device' if count == 1 else 'devices'}"]
    for device, row in zip(programs.devices, programs.rows, strict=True):
        lines += [device, *(f"  {step}" for step in row)]
    return "\n".join(lines)


def _around(programs: DevicePrograms, fault: Fault, lines: int = 4) -> str:
    """The part of a device's list around a fault."""
    device, position, reason = fault
    row = programs.rows[device]
    first, last = max(position - lines, 0), min(position + lines + 1, len(row))
    steps = [f"  {step}" + f"  <-- {reason}" * (at == position) for at, step in enumerate(row[first:last], first)]
    return "\n".join([programs.devices[device], *["  ..."] * (first > 0), *steps, *["  ..."] * (last < len(row))])
