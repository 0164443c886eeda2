"""Adds transfers to a schedule: for each device all that it runs, sends and receives, in order.

The schedule says which stage computes what and when; the program says which values move. Together they determine the
transfers. A send stands after the action that makes the value. A receive stands at the position that its device has
reached, by the clocks, when the value is made. Each pair of devices receives messages in the order in which they are
sent, as channels require.

Each replica of a stage runs the whole row. Samples are sent directly from the replicas that have them to those that
need them; gradients are added up after the stage's last backward (`gradient_buckets.py`).

There is no deadlock, even if a send waits until its receive has been reached. Give a run and the receives after it the
time when the run starts, and a send the time when its value is made: then each step only waits for earlier ones. (A
receive stands before the sends of the run that it follows.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import lcm

from fxpipe.ir.graph.value_types import tensors
from fxpipe.ir.replica_shares import in_common
from fxpipe.ir.schedule.schedule import Action, Costs, Schedule, starts
from fxpipe.ir.schedule.schedule_check import check

from .device_programs import DevicePrograms, Message, Step
from .gradient_buckets import added, begun, buckets, gathered
from .program import Program, recut

START = -1  # a position before all actions of a row
Sends = dict[int, list[Message]]  # the messages that a device sends after each position of its row
Clocks = dict[Action, float]  # when each action starts, if each takes one clock


def add_transfers(schedule: Schedule, program: Program) -> DevicePrograms:
    """The schedule's rows with all sends and receives that the program's moves and loans need. Raises ValueError if the
    schedule cannot run, or does not fit the program's stages and devices."""
    check(schedule)
    clock = starts(schedule, Costs(1, 1, 1, 1))
    replica_groups = zip(_devices(schedule, program), schedule.devices, strict=True)
    workers = [(label, k, row) for labels, row in replica_groups for k, label in enumerate(labels)]
    sends = [_of_replica(program, _sends(program, row), k) for _, k, row in workers]
    pairs = zip(workers, sends, strict=True)
    made = [made for (_, _, row), leaving in pairs for made in _made(clock, row, leaving)]
    rows = []
    for (label, k, row), leaving in zip(workers, sends, strict=True):
        arriving = [(at, m) for at, m in made if m.replicas[1] == k and label in program.stages[m.target].devices]
        rows.append(tuple(_row(schedule, program, row, leaving, _receives(clock, row, arriving), k)))
    return DevicePrograms(schedule.name, tuple(label for label, _, _ in workers), tuple(rows))


def _devices(schedule: Schedule, program: Program) -> tuple[tuple[str, ...], ...]:
    """For each row the names of the devices that run it."""
    stages: dict[tuple[str, ...], list[int]] = {}
    for stage in program.stages:
        stages.setdefault(stage.devices, []).append(stage.index)
    if tuple(map(tuple, stages.values())) != schedule.stages:
        there = "; ".join(f"{', '.join(devices)} runs the stages {here}" for devices, here in stages.items())
        raise ValueError(f"the schedule {schedule.name!r} has rows of the stages {list(schedule.stages)}, but {there}")
    return tuple(stages)


def _sends(program: Program, row: Sequence[Action]) -> Sends:
    """The messages that a device sends: lent tensors before all else, values after F, gradients after B or I, and the
    gradient of a borrowed tensor after the last backward of the stage that uses it."""
    mine, last = {action.stage for action in row}, _last(row)
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


def _of_replica(program: Program, sends: Sends, replica: int) -> Sends:
    """The messages of one replica, given those of its stages."""
    whole = {(move.value, move.target) for move in program.moves if recut(move, program) and move.dim is None}

    def parts(message: Message) -> Iterator[Message]:
        here, there = (range(len(program.stages[s].devices)) for s in (message.source, message.target))
        user = message.source if message.gradient else message.target
        if message.micro_batch is None or (message.value, user) in whole:  # the first replica acts for all
            ends = [(k, 0) for k in here] if message.gradient else [(0, k) for k in there]
        elif len(here) == len(there):
            ends = [(k, k) for k in here]
        else:
            ends = meetings(len(here), len(there))
        yield from (message._replace(replicas=pair) for pair in ends if pair[0] == replica)

    return {position: [part for message in here for part in parts(message)] for position, here in sends.items()}


@lru_cache(maxsize=256)
def meetings(here: int, there: int) -> list[tuple[int, int]]:
    """The pairs (one of `here` slices, one of `there` slices) that have samples in common for some number of samples.
    Slices are as even as possible, the larger ones first, so their ends differ a little from those of equal slices. For
    more samples than are tried here, the difference is less than the distance of two such ends, and adds no pair.

    >>> meetings(1, 2), meetings(2, 4)
    ([(0, 0), (0, 1)], [(0, 0), (0, 1), (1, 1), (1, 2), (1, 3)])
    """

    tried = range(1, lcm(here, there) * (max(here, there) // 4 + 2))
    return sorted({(a, b) for rows in tried for a, b, _ in in_common(rows, here, there)})


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
    """The messages of a device in the order of its sends, each after the clock at which it is made."""
    for position, messages in sends.items():
        at = 0.0 if position == START else clock[row[position]] + 1
        yield from ((at, message) for message in messages)


def _receives(clock: Clocks, row: Sequence[Action], arriving: Sequence[tuple[float, Message]]) -> Sends:
    """The messages to a device, by the position that it has reached when they are made. The stable sort keeps the order
    between each pair of devices."""
    begins = [clock[action] for action in row]
    receives: Sends = {}
    for at, message in sorted(arriving, key=lambda made: made[0]):
        receives.setdefault(bisect_left(begins, at), []).append(message)
    return receives


def _row(
    schedule: Schedule, program: Program, row: Sequence[Action], sends: Sends, receives: Sends, replica: int
) -> Iterator[Step]:
    """The steps of a device that is replica number `replica` of its stages. A receive at a position stands before the
    action there, and before the sends of the preceding action."""
    last, mine = _last(row), {action.stage for action in row}
    shared = [bucket for s in sorted(last, key=last.__getitem__) for bucket in buckets(program, s)]
    shared.sort(key=lambda bucket: bucket.late)
    for position, action in enumerate([None, *row], start=START):
        if action is not None:
            if action.kind in "BI" and _recomputes(schedule, program, action):
                yield Step("run", action._replace(kind="R"))
            yield Step("run", action)
        yield from (Step("receive", message) for message in receives.get(position + 1, ()))
        yield from (Step("send", message) for message in sends[position])
        for bucket in shared:
            if not bucket.late and last[bucket.stage] == position:
                yield from begun(bucket, replica)
    if replica == 0 and last:
        yield from (
            Step("reduce", Message(loan.state, loan.user, loan.home, None, True, (k, 0)))
            for loan in program.loans
            for k in range(len(program.stages[loan.user].devices))
            if loan.home in mine and _has_gradient(program, loan.state)
        )
    for bucket in shared:
        if bucket.late:
            yield from begun(bucket, replica)
    for bucket in shared:
        yield from added(bucket, replica)
    for bucket in shared:
        yield from gathered(bucket, replica)


def _last(row: Sequence[Action]) -> dict[int, int]:
    """The position of the last backward of each stage."""
    return {action.stage: position for position, action in enumerate(row) if action.kind != "F"}


def _recomputes(schedule: Schedule, program: Program, action: Action) -> bool:
    mode = program.stages[action.stage].checkpoint
    return mode == "always" or (mode == "except_last" and action.micro_batch + 1 < schedule.chunks)
