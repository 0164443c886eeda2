"""Adds transfers to a schedule: for each device all that it runs, sends and receives, in order.

The schedule says which stage computes what and when; the program says which values move. Together they determine the
transfers. A send or receive stands at the position that its device has reached, by the clocks, when the value is made:
a send just after the action that makes it. Each pair of devices receives messages in the order in which they are
sent, as channels require.

Each replica of a stage runs the whole row. Samples are sent directly from the replicas that have them to those that
need them; gradients are added up after the stage's last backward (`gradient_buckets.py`).

There is no deadlock, even if each device does one thing after the other and a send waits for its receive. Give both
ends of a message the time when its value is made, and a run the time when it starts. These times never fall along a row
(at the same time, messages come first, then collectives, in one order on all devices), so the earliest step that is
not done can always be done. Messages of one time are sent and received together: they have the same round. A collective
stands at the time when its last part is made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from math import lcm

from fxpipe.ir.graph.value_types import tensors
from fxpipe.ir.replica_shares import in_common
from fxpipe.ir.schedule.schedule import Action, Costs, Schedule, starts
from fxpipe.ir.schedule.schedule_check import check

from .device_programs import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, DevicePrograms, GroupCall, Message, Step
from .gradient_buckets import added, begun, buckets, gathered
from .program import Program, recut

START = -1  # a position before all actions of a row
Sends = dict[int, list[Message]]  # the messages that a device sends after each position of its row
Clocks = dict[Action, float]  # when each action starts, if each takes one clock
Made = tuple[float, Message]  # a message, after the clock at which it is made


def add_transfers(schedule: Schedule, program: Program) -> DevicePrograms:
    """The schedule's rows with all sends and receives that the program's moves and loans need. Raises ValueError if the
    schedule cannot run, or does not fit the program's stages and devices."""
    check(schedule)
    clock = starts(schedule, Costs(1, 1, 1, 1))
    replica_groups = zip(_devices(schedule, program), schedule.devices, strict=True)
    workers = [(label, k, row) for labels, row in replica_groups for k, label in enumerate(labels)]
    sends = [_of_replica(program, _sends(program, row), k) for _, k, row in workers]
    pairs = zip(workers, sends, strict=True)
    made = [list(_made(clock, row, leaving)) for (_, _, row), leaving in pairs]
    everything = sorted(chain.from_iterable(made), key=lambda one: one[0])  # stable: in the order of the sends
    calls = sorted(_group_calls(clock, program), key=lambda one: one[0])
    rows = []
    for (label, k, row), leaving in zip(workers, made, strict=True):
        arriving = [
            one for one in everything if one[1].replicas[1] == k and label in program.stages[one[1].target].devices
        ]
        mine = {stage.index for stage in program.stages if label in stage.devices}
        own = [(at, call) for at, call in calls if any(m.source in mine for m in call.messages)]
        rows.append(tuple(_row(schedule, program, clock, row, leaving, arriving, own, k)))
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
            here += [Message(move.value, s, move.target, i) for move in program.leaving[s]]
        if kind in "BI":
            here += [Message(move.value, s, move.source, i, True) for move in program.arriving[s]]
        if last.get(s) == position:
            here += [Message(loan.state, s, loan.home, None, True) for loan in program.borrowing[s]]
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


def _made(clock: Clocks, row: Sequence[Action], sends: Sends) -> Iterator[Made]:
    """The messages of a device in the order of its sends."""
    for position, messages in sends.items():
        at = 0.0 if position == START else clock[row[position]] + 1
        yield from ((at, message) for message in messages)


# The gradient of the sum, or of the whole, comes back in parts that are added up; that of a slice comes as a slice.
BACK = {ALL_REDUCE: ALL_REDUCE, REDUCE_SCATTER: ALL_GATHER, ALL_GATHER: REDUCE_SCATTER}


def _group_calls(clock: Clocks, program: Program) -> Iterator[tuple[float, GroupCall]]:
    """The collectives of all micro-batches, each after the clock at which its last part is made: those of values, and
    on the way back those of gradients."""
    for one in program.collectives:
        graded = any(_has_gradient(program, move.value) for move in one.moves)
        for kind, stage, i in clock:
            if stage != one.moves[0].source or kind not in ("FBI" if graded else "F"):
                continue
            back = kind != "F"
            ends = [(m.value, *((m.target, m.source) if back else (m.source, m.target))) for m in one.moves]
            last = max(clock[Action(kind, source, i)] for _, source, _ in ends)
            messages = tuple(Message(*end, i, back) for end in ends)
            yield last + 1, GroupCall(BACK[one.kind] if back else one.kind, messages, one.dim)


def _row(
    schedule: Schedule,
    program: Program,
    clock: Clocks,
    row: Sequence[Action],
    leaving: Sequence[Made],
    arriving: Sequence[Made],
    calls: Sequence[tuple[float, GroupCall]],
    replica: int,
) -> Iterator[Step]:
    """The steps of a device that is replica number `replica` of its stages. A message stands before the first action
    that starts when the message is made, or later."""
    last, mine = _last(row), {action.stage for action in row}
    shared = [bucket for s in sorted(last, key=last.__getitem__) for bucket in buckets(program, s)]
    shared.sort(key=lambda bucket: bucket.late)
    early = [bucket for bucket in shared if not bucket.late]
    timed = [(at, Step("receive", message)) for at, message in arriving]
    timed += [(at, Step("send", message)) for at, message in leaving]
    timed += [(clock[row[last[bucket.stage]]] + 1, step) for bucket in early for step in begun(bucket, replica)]
    timed += [(at, Step(call.kind, call)) for at, call in calls]
    timed.sort(key=lambda one: one[0])
    begins, gaps = [clock[action] for action in row], dict[int, list[Step]]()
    for at, step in timed:
        step = step if isinstance(step.what, GroupCall) else step._replace(round=int(at) + 1)
        gaps.setdefault(bisect_left(begins, at), []).append(step)
    for position, action in enumerate(row):
        yield from gaps.get(position, ())
        if action.kind in "BI" and _recomputes(schedule, program, action):
            yield Step("run", action._replace(kind="R"))
        yield Step("run", action)
    yield from gaps.get(len(row), ())
    if replica == 0 and last:
        yield from (
            Step("reduce", Message(loan.state, loan.user, loan.home, None, True, (k, 0)))
            for loan in program.loans
            for k in range(len(program.stages[loan.user].devices))
            if loan.home in mine and _has_gradient(program, loan.state)
        )
    end = int(max(clock.values(), default=0)) + 3  # the first round after all others
    for at, bucket in enumerate(bucket for bucket in shared if bucket.late):
        yield from (step._replace(round=end + at) for step in begun(bucket, replica))
    for at, bucket in enumerate(shared, end + len(shared)):
        yield from (step._replace(round=at) for step in added(bucket, replica))
    for bucket in shared:
        yield from gathered(bucket, replica)


def _last(row: Sequence[Action]) -> dict[int, int]:
    """The position of the last backward of each stage."""
    return {action.stage: position for position, action in enumerate(row) if action.kind != "F"}


def _recomputes(schedule: Schedule, program: Program, action: Action) -> bool:
    mode = program.stages[action.stage].checkpoint
    return mode == "always" or (mode == "except_last" and action.micro_batch + 1 < schedule.chunks)
