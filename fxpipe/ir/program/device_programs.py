"""Everything that each device does in a training step: a list of steps, each of them a run, a send, a receive, a
collective of several devices, a reduce or a gather.

    gpipe on 2 devices
    cuda:0
      run      0F0
      send     x[0]  0 -> 1
      receive  gradient of x[0]  1 -> 0
      run      0B0
    cuda:1
      receive  x[0]  0 -> 1
      run      1F0
      run      1B0
      send     gradient of x[0]  1 -> 0

A receive is posted and does not wait: the message may arrive from then on, while the device goes on. A run waits for
the messages that it takes.

The programs run where nothing is buffered, as in NCCL: if each device takes its steps one after the other, and a send
and its receive end only once both devices have come to them, no device waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import NamedTuple

from fxpipe.ir.schedule.schedule import Action

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = COLLECTIVES = "all-reduce", "reduce-scatter", "all-gather"
CALLS = frozenset(("send", "receive", *COLLECTIVES))  # what meets the same of other devices
Replica = tuple[int, int]  # a stage, and the number of a replica of it


class Message(NamedTuple):
    """A message from stage `source` to stage `target`.

    - `value`: the name of the value.
    - `micro_batch`: its micro-batch; None for a tensor of the model, which is sent once a step.
    - `gradient`: whether the message is the gradient of the value, on its way back.
    - `replicas`: the numbers of the sending and the receiving replica. With different numbers of replicas, the message
      has the samples that both have.

    >>> print(Message("x", 1, 0, micro_batch=3, gradient=True))
    gradient of x[3]  1 -> 0
    >>> print(Message("x", 0, 1, micro_batch=3, replicas=(2, 0)))
    x[3]  0.2 -> 1
    """

    value: str
    source: int
    target: int
    micro_batch: int | None = None
    gradient: bool = False
    replicas: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        what = self.value if self.micro_batch is None else f"{self.value}[{self.micro_batch}]"
        here, there = (f"{s}.{k}" if k else str(s) for s, k in (self.sender, self.receiver))
        return f"{'gradient of ' * self.gradient}{what}  {here} -> {there}"

    @property
    def sender(self) -> Replica:
        return self.source, self.replicas[0]

    @property
    def receiver(self) -> Replica:
        return self.target, self.replicas[1]


class GroupCall(NamedTuple):
    """A collective of one micro-batch: each device of a group gives a part, and gets what is made of all parts. That is
    a message within the device, with the name of what the later stage takes.

    - `kind`: "all-reduce": all get the sum of the parts; "reduce-scatter": each gets its slice of the sum;
      "all-gather": the parts are slices, and all get the whole.
    - `messages`: one for each device, in the order of the slices.
    - `dim`: the dimension of slices.

    >>> print(GroupCall("all-reduce", (Message("y", 0, 2, 1), Message("y_0", 1, 3, 1))))
    y[1]  0 -> 2 + y_0[1]  1 -> 3
    """

    kind: str
    messages: tuple[Message, ...]
    dim: int = 0

    def __str__(self) -> str:
        return " + ".join(map(str, self.messages))

    @property
    def micro_batch(self) -> int | None:
        return self.messages[0].micro_batch


class Step(NamedTuple):
    """One line of a device's list. `do` is one of:

    - "run": run an action; kind R is a recomputation.
    - "send", "receive": send a message, or post its receive.
    - "all-reduce", "reduce-scatter", "all-gather": give a part, and post the receive of what is made of all parts: all
      devices of the group take part in one call.
    - "reduce": add the gradient of a message to the device's own.
    - "gather": replace the device's own gradients by the sum in a message.

    `round`: sends and receives that stand side by side and have the same round are begun in one call, a batch. All ends
    of a batch's messages are in batches of this round. 0: a call of its own.
    """

    do: str
    what: Action | Message | GroupCall
    round: int = 0

    def __str__(self) -> str:
        return f"{self.do:<7}  {self.what}"


@dataclass(frozen=True)
class DevicePrograms:
    """For each device, by name, its steps in a training step, in order."""

    name: str
    devices: tuple[str, ...]
    rows: tuple[tuple[Step, ...], ...]

    def __str__(self) -> str:
        return show(self)

    __repr__ = __str__  # what a notebook's cell or the interpreter shows


# The checker ----------------------------------------------------------------------------------------------------

Fault = tuple[int, int, str]  # device, position in its row, reason


def check(programs: DevicePrograms) -> None:
    """Raise ValueError, with the place marked, if the programs cannot run:

    - a message is for or from a stage that is not on the device;
    - a message is sent but not received, or received but not sent;
    - messages are received in another order than they are sent;
    - a message is received after the action that takes it;
    - a device does not take part in a collective, or before the action that makes its part, or after the one that takes
      the result;
    - devices deadlock, where nothing is buffered.
    """
    faults = (_misplaced, _unmatched, _too_late, _alone, _stuck)
    fault = next(chain.from_iterable(find(programs) for find in faults), None)
    if fault is not None:
        device, _, reason = fault
        name = programs.devices[device]
        raise ValueError(f"the programs of {programs.name!r} cannot run: {name}: {reason}\n{_around(programs, fault)}")


def _device_of_each(programs: DevicePrograms) -> dict[Replica, int]:
    """The device of each replica of each stage; replicas are numbered in the order of the devices."""
    device_of: dict[Replica, int] = {}
    count: dict[int, int] = {}
    for device, row in enumerate(programs.rows):
        for stage in dict.fromkeys(step.what.stage for step in row if isinstance(step.what, Action)):
            device_of[stage, count.setdefault(stage, 0)] = device
            count[stage] += 1
    return device_of


def _messages(row: Sequence[Step], do: str) -> Iterator[tuple[int, Message]]:
    """The messages that a device sends or receives, each after its position in the row."""
    for position, step in enumerate(row):
        if step.do == do and isinstance(step.what, Message):
            yield position, step.what


def _misplaced(programs: DevicePrograms) -> Iterator[Fault]:
    """Finds messages of stages that are on no device, or not on this one."""
    device_of = _device_of_each(programs)
    for device, row in enumerate(programs.rows):
        for do in ("send", "receive"):
            for position, message in _messages(row, do):
                for replica in (message.sender, message.receiver):
                    if replica not in device_of:
                        yield device, position, f"{message} is for stage {replica[0]}, which no device runs"
                here = message.sender if do == "send" else message.receiver
                if device_of[here] != device:
                    yield device, position, f"stage {here[0]}, which {do}s {message}, is not here"


def _unmatched(programs: DevicePrograms) -> Iterator[Fault]:
    """Finds, for each pair of devices, the first message that is not received in the order of the sends."""
    device_of = _device_of_each(programs)
    pairs: dict[tuple[int, int], tuple[list[_At], list[_At]]] = {}
    for device, row in enumerate(programs.rows):
        for at in _messages(row, "send"):
            pairs.setdefault((device, device_of[at[1].receiver]), ([], []))[0].append(at)
        for at in _messages(row, "receive"):
            pairs.setdefault((device_of[at[1].sender], device), ([], []))[1].append(at)
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
    """The messages that an action waits for."""
    kind, s, i = action
    if kind == "F":
        return (s, i, False), (s, None, False)
    return ((s, i, True),) if kind in "BI" else ()


def _take(message: Message) -> _Take:
    return message.target, message.micro_batch, message.gradient


def _too_late(programs: DevicePrograms) -> Iterator[Fault]:
    """Finds receives that stand after the action that takes their message."""
    for device, row in enumerate(programs.rows):
        taken: dict[_Take, Action] = {}
        for position, (do, what, _) in enumerate(row):
            if do == "run" and isinstance(what, Action):
                taken |= dict.fromkeys(_takes(what), what)
            elif do == "receive" and isinstance(what, Message) and _take(what) in taken:
                yield device, position, f"receives {what} after {taken[_take(what)]}, which takes it"


def _alone(programs: DevicePrograms) -> Iterator[Fault]:
    """Finds collectives in which a device takes no part, or not between the actions that give and take."""
    device_of = _device_of_each(programs)
    there = [{step.what: at for at, step in enumerate(row) if step.do != "receive"} for row in programs.rows]
    for device, row in enumerate(programs.rows):
        for position, what in ((at, step.what) for at, step in enumerate(row) if isinstance(step.what, GroupCall)):
            ends = [(device_of.get(m.sender), device_of.get(m.receiver), m) for m in what.messages]
            own = [m for here, to, m in ends if here == to == device]
            missing = [str(m) for here, to, m in ends if here is None or here != to or what not in there[here]]
            if missing or len(own) != 1:
                yield device, position, f"no device gives the part {(missing or [str(what)])[0]}"
                continue
            kinds = "BI" if own[0].gradient else "F"
            for kind in kinds:
                made, taken = (there[device].get(Action(kind, s, own[0].micro_batch or 0)) for s in own[0][1:3])
                if (made is not None and made > position) or (taken is not None and taken < position):
                    yield (
                        device,
                        position,
                        f"{what.kind} of {own[0]} before the part is made, or after the result is taken",
                    )


def _stuck(programs: DevicePrograms) -> Iterator[Fault]:
    """Finds devices that wait for ever, by running all programs where nothing is buffered: each device takes its steps
    one after the other, and ends a batch only when all ends of its messages are in the current batches of their
    devices, and a collective only when it is the current call of all devices of its group. So nothing has to arrive
    early, and one queue for all calls of a device is enough, whichever communicators they are of.

    As each device waits only for what stands before in its own row, a program that passes does so, too, where messages
    may arrive earlier, batches end one part after the other, or fewer messages are sent."""
    rows = [[batch for batch in batches(row) if batch[0][1].do in CALLS] for row in programs.rows]
    ends: dict[Message | GroupCall, list[tuple[int, int]]] = {}  # the device and batch of all ends of each call
    for device, row in enumerate(rows):
        for at, batch in enumerate(row):
            for _, step in batch:
                assert not isinstance(step.what, Action)
                ends.setdefault(step.what, []).append((device, at))
    current = [0] * len(rows)
    awake = deque(range(len(rows)))
    while awake:
        first = awake.popleft()
        together = _meeting(rows, ends, current, first)
        for device in together:
            current[device] += 1
        awake.extend(together)
    for device, row in enumerate(rows):
        if current[device] < len(row):
            for position, step in row[current[device]]:
                assert not isinstance(step.what, Action)
                if any(current[other] != at for other, at in ends[step.what]):
                    yield device, position, f"waits for ever for {step.what}"


_Batch = list[tuple[int, Step]]  # steps, each after its position in the row


def batches(row: Sequence[Step]) -> Iterator[_Batch]:
    """The steps of a row, those that are one batch together."""
    before, batch = 0, _Batch()
    for position, step in enumerate(row):
        own = step.round if step.do in ("send", "receive") else 0
        if batch and not (own and own == before):
            yield batch
            batch = []
        batch.append((position, step))
        before = own
    if batch:
        yield batch


def _meeting(
    rows: Sequence[Sequence[_Batch]],
    ends: Mapping[Message | GroupCall, Sequence[tuple[int, int]]],
    current: Sequence[int],
    first: int,
) -> set[int]:
    """The devices whose current batches end together with that of device `first`; none if one of them has not come to
    its batch yet."""
    if current[first] == len(rows[first]):
        return set()
    found, new = {first}, [first]
    while new:
        device = new.pop()
        for _, step in rows[device][current[device]]:
            for other, at in ends[step.what]:  # type: ignore[index]
                if current[other] != at:
                    return set()
                if other not in found:
                    found.add(other)
                    new.append(other)
    return found


# The printer ----------------------------------------------------------------------------------------------------


def show(programs: DevicePrograms) -> str:
    """The text of the programs: under each device a line per step."""
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
