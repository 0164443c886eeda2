"""What each device does in each moment of a step, and while it is idle, what it waits for.

    cpu:0   F0  F1  ....................  B0      idle: it waits for B0 of cpu:1,
    cpu:1       F0  ....  F1  B0  ------          which waits for a message while it is idle itself,
                    wait  |       transfer        and whose gradients take time to arrive

An idle device waits for the last of what its next action needs: another device's action, then the arrival of its
values. If everything is there, the host is late. While the other device is idle itself, what that one waits for is the
cause: so each moment has the cause at the end of the chain.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fxpipe.ir.schedule.schedule import Action, Schedule, needs
from fxpipe.ir.timeline import Span, Timeline

COMPUTE, WAIT, TRANSFER, HOST = "compute", "wait", "transfer", "host"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a device's time.

    - `start`, `end`: in seconds.
    - `cause`: COMPUTE: it runs an action; WAIT: another device does; TRANSFER: values move; HOST: none of these.
    - `by`: the device that computes, or whose host is late; the link that carries the values.
    - `span`: the action that runs.
    """

    start: float
    end: float
    cause: str
    by: str
    span: Span | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


Pieces = Sequence[Piece]


def pieces(timeline: Timeline, schedule: Schedule) -> dict[str, tuple[Piece, ...]]:
    """The pieces of each device, in order: without gaps, from the start of the timeline's window to its end.
    `schedule`: of the step; its `sources` say which stages take from which."""
    own = _Own(timeline, schedule)
    direct = {device: tuple(own.pieces(device)) for device in timeline.devices}
    return {
        device: tuple(piece for one in direct[device] for piece in _followed(one, direct, {device}))
        for device in timeline.devices
    }


class _Own:
    """The pieces of single devices: what they wait for directly.

    - `runs`: when each action ran, on each of its devices.
    - `moved`: the transfers by device to which, stage and micro-batch.
    - `last`: the action that ends last.
    """

    def __init__(self, timeline: Timeline, schedule: Schedule) -> None:
        self.timeline, self.schedule = timeline, schedule
        self.runs: dict[Action, list[Span]] = {}
        self.moved: dict[tuple[str, int, int], list[Span]] = {}
        for span in timeline.spans:
            if span.where not in timeline.devices:
                key = span.where.rpartition(" -> ")[2], span.stage, span.micro_batch
                self.moved.setdefault(key, []).append(span)
            else:
                self.runs.setdefault(Action(span.kind, span.stage, span.micro_batch), []).append(span)
        self.last = max((one for some in self.runs.values() for one in some), key=lambda one: one.end, default=None)

    def pieces(self, device: str) -> Iterator[Piece]:
        free, stop = self.timeline.window
        for span in self.timeline.on(device):
            start, end = max(span.start, free), max(span.end, free)
            yield from self._gap(device, free, start, span)
            if end > start:
                yield Piece(start, end, COMPUTE, device, replace(span, start=start, end=end))
            free = end
        yield from self._rest(device, free, stop)

    def _gap(self, device: str, free: float, start: float, span: Span) -> Iterator[Piece]:
        """What the device waits for before an action."""
        made = [one for need in self._needs(span) for one in self.runs.get(need, ()) if one.where != device]
        done = [one for one in made if one.end <= start]
        at = free
        if done:
            last = max(done, key=lambda one: one.end)
            yield from _some(Piece(at, max(at, last.end), WAIT, last.where))
            at = max(at, last.end)
        stages = {one.stage for one in made}
        came = [one for stage in stages for one in self.moved.get((device, stage, span.micro_batch), ())]
        came = [one for one in came if one.end <= start]
        if came:
            last = max(came, key=lambda one: one.end)
            yield from _some(Piece(at, max(at, last.end), TRANSFER, last.where))
            at = max(at, last.end)
        yield from _some(Piece(at, start, HOST, device))

    def _needs(self, span: Span) -> Sequence[Action]:
        """The actions of other stages that this one waits for: a recomputation runs as soon as its device is free."""
        action = Action(span.kind, span.stage, span.micro_batch)
        if span.kind == "R":
            return ()
        return [need for need in needs(self.schedule, action) if need.stage != span.stage]

    def _rest(self, device: str, free: float, stop: float) -> Iterator[Piece]:
        """What the device waits for after its last action: that all devices are done, and gradients are added up."""
        if self.last is not None and self.last.where != device:
            yield from _some(Piece(free, stop, WAIT, self.last.where))
            return
        sums = [span for span in self.timeline.spans if span.kind == "A" and free < span.end <= stop]
        if sums:
            last = max(sums, key=lambda one: one.end)
            yield Piece(free, last.end, TRANSFER, last.where)
            free = last.end
        yield from _some(Piece(free, stop, HOST, device))


def _some(piece: Piece) -> Iterator[Piece]:
    """The piece, unless it is empty."""
    if piece.end > piece.start:
        yield piece


def _followed(piece: Piece, direct: Mapping[str, Pieces], seen: Collection[str]) -> Iterator[Piece]:
    """A piece with the causes at the end of the chain: while the device that it waits for is idle, what that one waits
    for. `seen`: the devices on the way, so that clocks which disagree cannot lead in a circle."""
    if piece.cause != WAIT or piece.by in seen:
        yield piece
        return
    there = direct[piece.by]
    first = bisect_right(there, piece.start, key=lambda one: one.end)
    for one in there[first:]:
        if one.start >= piece.end:
            return
        part = replace(one, start=max(one.start, piece.start), end=min(one.end, piece.end))
        if one.cause == COMPUTE:
            yield replace(part, cause=WAIT)
        else:
            yield from _followed(part, direct, {*seen, piece.by})
