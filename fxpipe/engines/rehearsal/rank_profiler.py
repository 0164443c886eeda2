"""Measures the time of each action of a step over ranks: each rank runs its program, on real values, and waits for no
other.

    the step       rank 0   0F0 send  0F1 send  .........  0B0  .........  0B1
                   rank 1   ........  1F0 1B0 send  1F1 1B1 send

    its rehearsal  rank 0   0F0 send  0F1 send  0B0  0B1        messages are sent, too, but actions take those that
                   rank 1   1F0 1B0 send  1F1 1B1 send          were received in one real step

The ranks rehearse at the same time, so they share caches, memory and cores as in a step. What a rank does between two
actions, such as writing messages, counts to the first of them. How long a message is on its way is measured apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations, pairwise
from math import inf
from statistics import fmean
from time import perf_counter
from typing import Any

from torch import Tensor

from fxpipe.engines.common.step import Step, wrap
from fxpipe.engines.common.step_contract import ACTIONS
from fxpipe.engines.common.step_timer import StepTimer
from fxpipe.engines.ranks.input_checksums import Unread
from fxpipe.engines.ranks.rank_engine import RankScheduler
from fxpipe.engines.ranks.rank_group import World
from fxpipe.engines.ranks.rank_program import RankCollective
from fxpipe.engines.ranks.rank_run import RankRun
from fxpipe.engines.ranks.rank_transport import RankTransport
from fxpipe.engines.transports.mailbox import Key
from fxpipe.engines.transports.same_machine import SPIN
from fxpipe.ir.cluster.cluster import Link
from fxpipe.ir.program.device_programs import ALL_GATHER
from fxpipe.ir.schedule.action_times import Times
from fxpipe.ir.schedule.schedule import Action
from fxpipe.ir.timeline import KEPT, Timeline
from fxpipe.runtime.autograd.gradient_aliases import Pair, commit_gradients

from .action_profiler import Rehearsed, stand_ins, timed_recompute, untouched

ROUNDS = 20  # of the messages of one size between each two ranks
LARGE, LARGEST = 2**20, 2**26  # bytes of the large ones


def rehearse_ranks(
    engine: RankScheduler,
    batch: Sequence[Any],
    chunks: int,
    rounds: int,
    seed: int,
    given: Callable[[], Unread],
    warmup: int = 1,
) -> Rehearsed:
    """As `action_profiler.rehearse`, over ranks, which make this call together and get the same. `seed` and `given` as
    for a step. Raises Lost, and what a step raises."""
    recorder = Recorder(engine.world)
    with untouched(engine.steps):
        outputs = engine.run(batch, chunks, None, seed, observer=recorder, given=given, commit_pairs=drop)
    links = handovers(engine.world)  # after the step: if a rank cannot take part in this call, that tells the others
    grads: list[Pair] = []
    times = [once(engine, batch, chunks, seed, recorder.received, links, grads) for _ in range(warmup + rounds)]
    return times[warmup:], outputs, recorder.timeline(tuple(dict.fromkeys(engine.steps.devices)))


def once(
    engine: RankScheduler,
    batch: Sequence[Any],
    chunks: int,
    seed: int,
    received: Mapping[Key, Any],
    links: tuple[Link, ...],
    grads: list[Pair],
) -> Times:
    """The times of one rehearsal. `grads` keeps its gradients until the next one, as a model does: if all memory were
    free between two, the process would give it back to the system, and get it page by page."""
    grads.clear()
    replay = Replay(received)
    with untouched(engine.steps):
        start = perf_counter()
        engine.run(batch, chunks, None, seed, observer=replay, commit_pairs=partial(replay.commit, grads))
        end = perf_counter()
    ranks: list[Notes] = engine.world.all_gather_object(replay.notes(start, end))
    return Times(
        dict(sorted(chain.from_iterable(one.seconds.items() for one in ranks))),
        dict(chain.from_iterable(one.messages.items() for one in ranks)),
        before=max(one.before for one in ranks),
        # The rank that ends last waits least for the verdict of the others.
        after=min(one.verdict for one in ranks) + max(one.after for one in ranks),
        links=links,
    )


class Recorder:
    """Records the values that this rank receives in a step, and the timelines of all ranks, each by its own clock."""

    def __init__(self, world: World) -> None:
        self.world, self.timer = world, StepTimer()
        self.received: dict[Key, Any] = {}
        self.timelines: list[Timeline] = []

    def begin(self, m: Step) -> None:
        self.timer.begin(m)

    def watch(self, run: RankRun) -> None:
        wrap(run.transport, {"open_message": self.open_message})

    def open_message(self, transport: RankTransport, open_message: Callable[..., Any], key: Key) -> Any:
        value = open_message(transport, key)
        self.received[key] = copied(value)
        return value

    def report(self) -> None:
        self.timelines += self.world.all_gather_object(self.timer.timeline(""))

    def timeline(self, devices: tuple[str, ...]) -> Timeline:
        """What each device did and kept, by the clock of its rank."""
        spans = tuple(span for one in self.timelines for span in one.spans)
        memory = {label: steps for one in self.timelines for label, steps in zip(one.devices, one.memory, strict=True)}
        return Timeline("", devices, spans, (), tuple(memory.get(label, ()) for label in devices), counts=KEPT)


@dataclass(frozen=True)
class Notes:
    """The times of one rank in a rehearsal, in seconds.

    - `seconds`: of each action; `messages`: of them those before it computes, for receives, and after, for sends.
    - `before`: from the beginning of the call to the first action.
    - `verdict`: from when all messages have been received to when the verdict of all ranks is known; `after`: from then
      to the end of the call.
    """

    seconds: Mapping[Action, float]
    messages: Mapping[Action, tuple[float, float]]
    before: float
    verdict: float
    after: float


class Replay:
    """Gives this rank the values that it received in the recorded step.

    - `parts`: of how many parts each sum is, by the key of the sum.
    - `starts`: when each action began; `ended`: when the last one had ended, and its messages were sent.
    - `again`: the seconds of recomputations; `computed`: when each action began and ended to compute.
    - `verdict`: when all that was sent has been received, and when the verdict of all ranks was known.
    - `copying`: the seconds that only a rehearsal takes.
    """

    def __init__(self, received: Mapping[Key, Any]) -> None:
        self.received = received
        self.parts: dict[Key, int] = {}
        self.starts: list[tuple[float, Action]] = []
        self.again: dict[Action, float] = {}
        self.computed: dict[Action, tuple[float, float]] = {}
        self.ended = self.copying = 0.0
        self.verdict = (0.0, 0.0)

    def begin(self, m: Step) -> None:
        computing = {name: partial(self.compute, kind) for name, kind in ACTIONS.items()}
        wrap(m, {**computing, "recompute": partial(timed_recompute, self.again)})

    def watch(self, run: RankRun) -> None:
        wrap(run, {"_act": self.act, "_receive_rest": self.receive_rest, "_conclude": self.conclude})
        wrap(run.transport, {"open_message": self.open_message, "share": self.share})

    def report(self) -> None:
        """There is nothing to exchange before the end of the call."""

    def act(self, run: RankRun, act: Callable[..., None], action: Action) -> None:
        self.starts.append((perf_counter(), action))
        act(run, action)

    def compute(self, kind: str, m: Step, compute: Callable[..., Any], j: int, i: int, *args: Any) -> Any:
        start = perf_counter()
        found = compute(m, j, i, *args)
        self.computed[Action(kind, j, i)] = start, perf_counter()
        return found

    def share(self, transport: RankTransport, share: Callable[..., None], line: RankCollective) -> None:
        self.parts[line.own.key] = 1 if line.kind == ALL_GATHER else len(line.ranks)
        share(transport, line)

    def open_message(self, transport: RankTransport, open_message: Callable[..., Any], key: Key) -> Any:
        """The recorded value, in the time that it takes to read a message that is there, or to add up parts."""
        if self.ended:
            return open_message(transport, key)
        value = copied(self.received[key])
        if isinstance(value, Tensor):
            for _ in range(self.parts.get(key, 1) - 1):
                value.detach() + value.detach()
        return value

    def receive_rest(self, run: RankRun, receive_rest: Callable[..., None]) -> None:
        self.ended = perf_counter()
        receive_rest(run)

    def conclude(self, run: RankRun, conclude: Callable[..., None]) -> None:
        start = perf_counter()
        conclude(run)
        self.verdict = start, perf_counter()

    def commit(self, grads: list[Pair], pairs: list[Pair]) -> None:
        start = perf_counter()
        grads += stand_ins(pairs)
        self.copying = perf_counter() - start
        commit_gradients(grads)

    def notes(self, start: float, end: float) -> Notes:
        """What is known after the call, which took from `start` to `end`."""
        found, messages = dict(self.again), dict[Action, tuple[float, float]]()
        moments = [*(began for began, _ in self.starts), self.ended]
        for (_, action), (began, ended) in zip(self.starts, pairwise(moments), strict=True):
            again = self.again.get(Action("R", *action[1:]), 0.0) if action.kind in "BI" else 0.0
            found[action] = ended - began - again
            start_of, end_of = self.computed[action]
            messages[action] = start_of - began - again, ended - end_of
        asked, known = self.verdict
        return Notes(found, messages, moments[0] - start, known - asked, end - known - self.copying)


def copied(value: Any) -> Any:
    """A leaf like a received value, in memory of its own."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def drop(pairs: list[Pair]) -> None:
    """Adds no gradients."""


# Messages -------------------------------------------------------------------------------------------------------------


def handovers(world: World) -> tuple[Link, ...]:
    """For each two ranks, how soon a message of one reaches the other, which waits for it. What ranks of one machine do
    to write and read it is a part of their actions, so there bytes take no further time. All ranks make this call
    together. Raises Lost."""
    pairs = list(combinations(range(len(world.labels)), 2))
    of_all = world.all_gather_object({pair: _link(world, *pair) for pair in pairs if world.rank in pair})
    return tuple(of_all[pair[0]][pair] for pair in pairs)


def _link(world: World, a: int, b: int) -> Link:
    """The link between these ranks, one of which this is, as the first of them measures it."""
    peer = a + b - world.rank
    latency = fmean(_round(world, peer, b"") for _ in range(ROUNDS)) / 2  # not the median: waits add up
    bandwidth = inf if peer in world.local_peers else _bandwidth(world, peer, latency)
    return Link((world.labels[a], world.labels[b]), bandwidth, latency)


def _bandwidth(world: World, peer: int, latency: float) -> float:
    """The bytes per second of messages so large that they take longer than empty ones, as the smaller of two ranks
    measures them: on a machine that is busy, those of `LARGE` bytes may not."""
    size = LARGE
    while True:
        taken = fmean(_round(world, peer, bytes(size)) for _ in range(ROUNDS))
        longer = taken - 2 * latency
        if world.rank > peer:
            if world.hear(peer):
                return inf  # not used: `handovers` takes the figure of the smaller rank
        else:
            enough = longer > 0 or size >= LARGEST
            world.tell(peer, data=b"enough" if enough else b"")
            if enough:
                return size / (longer if longer > 0 else taken)
        size *= 4


def _round(world: World, peer: int, data: bytes) -> float:
    """The seconds of a message to the larger of two ranks and of an empty one back, as the smaller one measures them.
    Each waits long enough to fall asleep, as in a step."""
    if world.rank > peer:
        world.hear(peer)
        work(2 * SPIN)
        world.tell(peer, data=b"")
        return 0.0
    work(2 * SPIN)
    start = perf_counter()
    world.tell(peer, data=data)
    world.hear(peer)
    return perf_counter() - start - 2 * SPIN


def work(seconds: float) -> None:
    """Keep this core busy."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass
