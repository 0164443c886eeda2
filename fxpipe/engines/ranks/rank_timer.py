"""Records when each action of a step over ranks began and ended: one timeline, from the notes of all ranks.

Each rank reads its own clock; before the notes are exchanged, times become the leader's (`clock_sync.py`). No rank sees
a message arrive, so each message is noted when it is sent and when it is taken. Messages from one rank to another
arrive in order, so a message has arrived by the time when it, or one sent after it, is taken:

    sent    a   b       c                      a link carries one message after the other: each begins when it was
    taken                  a   c   b           sent, or when the one before it has arrived
    link    aaaaaaaaaaaaaaabbbbc
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from time import perf_counter
from typing import Any

from fxpipe.engines.common.step import Step, wrap
from fxpipe.engines.common.step_timer import StepTimer
from fxpipe.engines.transports.mailbox import Key
from fxpipe.ir.program.device_programs import Message
from fxpipe.ir.timeline import KEPT, PEAK, Span, Steps, Timeline

from .clock_sync import ahead
from .rank_group import World
from .rank_program import RankCollective, RankMessage
from .rank_run import RankRun
from .rank_transport import RankTransport


@dataclass(frozen=True)
class Notes:
    """The notes of one rank for a step. All times are in seconds of the leader's clock.

    - `begun`: when the step began; `call`: when its call began and ended.
    - `spans`: its actions.
    - `sent`, `taken`: when it sent and took each message.
    - `memory`: of its devices.
    """

    begun: float
    call: tuple[float, float]
    spans: tuple[Span, ...]
    sent: Mapping[Message, float]
    taken: Mapping[Message, float]
    memory: Mapping[str, Steps]


class RankTimer:
    """Records one step of one rank.

    - `sending`, `taking`: when it sent and took each message, by its own clock.
    - `notes_of_all`: the notes of all ranks, once they are exchanged.
    """

    def __init__(self, world: World) -> None:
        self.world, self.timer = world, StepTimer()
        self.sending: dict[Message, float] = {}
        self.taking: dict[Message, float] = {}
        self.notes_of_all: list[Notes] = []

    def begin(self, m: Step) -> None:
        self.timer.begin(m)

    def watch(self, run: RankRun) -> None:
        """Record the messages, too."""
        wrap(run.transport, {"dispatch": self.dispatch, "open_message": self.open_message, "share": self.share})

    def dispatch(self, transport: RankTransport, dispatch: Callable[..., None], entry: RankMessage) -> None:
        if transport.size(entry) is not None:
            self.sending[entry.message] = perf_counter()
        dispatch(transport, entry)

    def share(self, transport: RankTransport, share: Callable[..., None], line: RankCollective) -> None:
        self.sending[line.own.message] = perf_counter()
        share(transport, line)

    def open_message(self, transport: RankTransport, open_message: Callable[..., Any], key: Key) -> Any:
        message = transport.pending_receives[key][0].message
        value = open_message(transport, key)
        self.taking[message] = perf_counter()
        return value

    def report(self) -> None:
        """Exchange the notes with the other ranks. Raises Lost."""
        own = self.timer.timeline("")
        later = ahead(self.world)
        begun = self.timer.started - later
        start, end = own.window
        spans = tuple(shifted(span, begun) for span in own.spans)
        sent, taken = (
            {
                message: at - later
                for message, at in noted.items()
                if message.micro_batch is not None or message.gradient
            }
            for noted in (self.sending, self.taking)
        )
        memory = {label: moved(steps, begun) for label, steps in zip(own.devices, own.memory, strict=True)}
        self.notes_of_all += self.world.all_gather_object(
            Notes(begun, (begun + start, begun + end), spans, sent, taken, memory)
        )

    def timeline(self, name: str, replica_groups: Sequence[Sequence[str]]) -> Timeline:
        """The timeline of all ranks, in seconds since the first of them began."""
        return together(name, replica_groups, self.notes_of_all)


def together(name: str, replica_groups: Sequence[Sequence[str]], notes: Sequence[Notes]) -> Timeline:
    """The timeline of all ranks. `replica_groups` has the devices of each stage, one for each replica."""
    begun = min(one.begun for one in notes)
    labels = tuple(dict.fromkeys(label for replica_group in replica_groups for label in replica_group))
    taken = {message: at for one in notes for message, at in one.taken.items()}
    links: dict[str, list[tuple[float, float, Message]]] = {}
    for one in notes:
        for message, at in sorted(one.sent.items(), key=lambda pair: pair[1]):
            (source, here), (target, there) = message.sender, message.receiver
            ends = replica_groups[source][here], replica_groups[target][there]
            link = f"collectives of {ends[0]}" if ends[0] == ends[1] else " -> ".join(ends)
            links.setdefault(link, []).append((at, taken[message], message))
    spans = [span for one in notes for span in one.spans]
    spans += [span for link in sorted(links) for span in carried(link, links[link])]
    memory = {label: moved(steps, -begun) for one in notes for label, steps in one.memory.items()}
    return Timeline(
        name,
        labels,
        tuple(shifted(span, -begun) for span in spans),
        tuple(sorted(links)),
        tuple(memory.get(label, ()) for label in labels),
        (min(one.call[0] for one in notes) - begun, max(one.call[1] for one in notes) - begun),
        KEPT if all(label.startswith("cpu") for label in labels) else PEAK,
    )


def carried(link: str, messages: Sequence[tuple[float, float, Message]]) -> Iterator[Span]:
    """When a link carried each message. `messages` has the times at which each was sent and taken, in the order of the
    sends."""
    there = [*accumulate((taken for _, taken, _ in reversed(messages)), min)][::-1]
    free = float("-inf")
    for (sent, _, message), arrived in zip(messages, there, strict=True):
        start, end = max(sent, free), max(sent, free, arrived)
        free = end
        label = f"{'gradient of ' * message.gradient}{message.value}"
        # What moves once a step adds up gradients, of replicas or of the users of one weight.
        kind = "A" if message.micro_batch is None else "T"
        yield Span(link, start, end, kind, message.source, message.micro_batch or 0, label)


def moved(steps: Steps, seconds: float) -> Steps:
    return tuple((at + seconds, held) for at, held in steps)


def shifted(span: Span, seconds: float) -> Span:
    return replace(span, start=span.start + seconds, end=span.end + seconds)
