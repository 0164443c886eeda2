"""The timeline of one training step from a schedule and the costs of stages and transfers, without running it.

Devices run their rows in order and links carry values in the order they are made, so there are no choices. One walk
over the actions, in any order in which they can run, gives each start as the latest end of what the action waits for.
The work grows with the number of actions and transfers, not with the simulated time.

The model of a step, for stage s and micro-batch i:

- F(s, i) and B(s, i) start when the device is free and what comes over the links has arrived;
- the recomputation of (s, i) starts when the device is free: it does not wait for the gradient;
- an overlapped pair starts when what both need has arrived, takes as long as both one after the other, and what both
  make leaves at its end;
- a value leaves when its stage has made it, and a gradient when B or I has; each pair of devices has a link in each
  direction that carries one value at a time, and a transfer keeps neither device busy;
- the replicas of a stage run in lock-step and are one device here; after its last backward their gradients are added
  up, in one `Reduction`, or in several as parts are complete; these run one at a time and leave the device free;
- a stage keeps its activations from the start of its forward, or of its recomputation, to the end of its backward
  (of its W if that is split; where backward is code, from I to W only what W needs); while it waits for recomputation
  it keeps only what it took;
- memory that is known piece by piece counts once on a device, though several of its stages keep it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from fxpipe.ir.program.kept_bytes import WHOLE_INPUT, KeptBytes, Memory, Piece
from fxpipe.ir.schedule.schedule import Action, Schedule, at_once, needs, order
from fxpipe.ir.schedule.schedule_check import check
from fxpipe.ir.timeline import Span, Steps, Timeline


@dataclass(frozen=True)
class StageCost:
    """What a stage costs per micro-batch.

    - `forward`, `backward`: seconds; input gradient and weight gradient take half of `backward` each.
    - `saved`: bytes kept for the backward.
    - `taken`: bytes taken from other stages.
    - `kept`: which pieces of memory these bytes are, and those kept from I to W. None: pieces of its own, which the
      stage keeps to the end of backward; so W needs all that is saved, and what it took stays after forward has run
      again.
    - `fixed`: bytes in use independent of micro-batches.
    - `checkpoint`: as in a plan, "never", "except_last" or "always".
    - `keeps_at_once`: whether nothing is recomputed if backward directly follows forward.
    """

    forward: float
    backward: float
    _: KW_ONLY
    saved: int = 0
    taken: int = 0
    kept: KeptBytes | None = None
    fixed: int = 0
    checkpoint: str = "never"
    keeps_at_once: bool = False

    def seconds(self, kind: str) -> float:
        return {"B": self.backward, "I": self.backward / 2, "W": self.backward / 2}.get(kind, self.forward)

    def pieces(self, stage: int, again: bool) -> KeptBytes:
        """What the stage keeps of a micro-batch, piece by piece. `again`: whether forward runs a second time; what it
        makes then is not the memory that other stages took after the first."""
        if self.kept is not None:
            new = {piece: (stage, f"{piece[1]}, again") for piece in self.kept.saved if again and piece[0] == stage}
            return self.kept.renamed(new)
        saved = {(stage, "saved"): self.saved}
        return KeptBytes(saved, {(stage, "taken"): self.taken}, saved)


@dataclass(frozen=True)
class Hop:
    """Values that go from stage `source` to stage `target` for each micro-batch: `forward` seconds, and `backward`
    seconds for their gradients. `label` names them."""

    source: int
    target: int
    forward: float
    backward: float
    label: str = ""


@dataclass(frozen=True)
class Reduction:
    """Replicas of `stage` add up gradients, which takes `seconds`. The gradients are complete `early` seconds before
    the stage's last backward ends. `label` names them."""

    stage: int
    seconds: float
    early: float = 0.0
    label: str = ""


class Change(NamedTuple):
    """A device begins (`by` is 1) or ends (-1) to keep memory of micro-batch i, `at` a moment."""

    at: float
    i: int
    memory: Memory
    by: int


@dataclass
class _Clock:
    """The state of the walk: when devices and links are free, when actions ended, and what happened so far."""

    free_at: dict[str, float]  # per device and link, when it is free
    took: Mapping[Action, float]
    ended: dict[Action, float] = field(default_factory=dict)
    arrived: dict[Action, float] = field(default_factory=dict)  # the last value that an action takes
    spans: list[Span] = field(default_factory=list)
    held: dict[str, list[Change]] = field(default_factory=dict)

    def occupy(self, where: str, ready: float, seconds: float, action: Action, label: str = "") -> Span:
        """`action` runs on a device or link as soon as that is free and the action is ready."""
        start = max(ready, self.free_at.get(where, 0.0))
        span = Span(where, start, start + seconds, *action, label)
        self.free_at[where] = span.end
        self.spans.append(span)
        return span

    def run(self, device: str, ready: float, cost: StageCost, action: Action) -> Span:
        """Occupy a device for as long as the action takes."""
        seconds = self.took.get(action)
        return self.occupy(device, ready, cost.seconds(action.kind) if seconds is None else seconds, action)

    def keep(self, device: str, at: float, i: int, memory: Memory) -> None:
        """The device keeps this memory of micro-batch i from a moment on."""
        self.held[device].append(Change(at, i, memory, 1))

    def free(self, device: str, at: float, i: int, memory: Memory) -> None:
        """The device keeps this memory once less from a moment on."""
        self.held[device].append(Change(at, i, memory, -1))


def simulate(
    schedule: Schedule,
    costs: Sequence[StageCost],
    hops: Sequence[Hop] = (),
    devices: Sequence[str] = (),
    reductions: Sequence[Reduction] = (),
    took: Mapping[Action, float] | None = None,
) -> Timeline:
    """The timeline of `schedule` with a cost for each stage. `devices` are names, one per row; `reductions` are done in
    their order; `took` has measured seconds of actions, which replace their costs. Raises ValueError if the numbers of
    devices, costs and stages differ, or if the schedule cannot run.

    >>> from fxpipe.ir.schedule.schedule import parse
    >>> schedule = parse("F0 F1 . B1 B0 \\n . F0 F1 B1 B0", name="gpipe")
    >>> print(simulate(schedule, [StageCost(1, 2, saved=1000)] * 2, [Hop(0, 1, 0.5, 0.5)]))
    gpipe: 10 s, bubble 40.0%
    device    busy    idle    peak memory
    device 0  6 s     4 s     2 kB
    device 1  6 s     4 s     2 kB
    """
    names = tuple(devices) or tuple(f"device {device}" for device in range(len(schedule.devices)))
    if len(names) != len(schedule.devices):
        raise ValueError(f"{len(names)} names for the {len(schedule.devices)} devices of the schedule")
    if len(set(names)) != len(names):
        raise ValueError(f"devices are {names}: a device has one row; share(schedule, devices) joins its rows")
    if len(costs) != schedule.num_stages:
        raise ValueError(f"costs of {len(costs)} stages for a schedule of {schedule.num_stages}")
    home = [names[device] for _, device in sorted((s, d) for d, row in enumerate(schedule.stages) for s in row)]
    sends = _sends(hops, home)
    clock = _Clock(free_at=dict.fromkeys(names, 0.0), took=took or {}, held={name: [] for name in names})
    actions, stuck = order(schedule)
    if stuck:
        check(schedule)
    forwards = {backward: forward for forward, backward in schedule.beside.items()}
    for action in actions:
        ready = max((clock.ended[need] for need in needs(schedule, action)), default=0.0)
        if action in schedule.beside:
            ready = max(ready, clock.arrived.get(schedule.beside[action], 0.0))
        span = _compute(clock, schedule, action, home[action.stage], costs[action.stage], ready)
        if action in schedule.beside:  # what it makes leaves when the backward beside it is done, too
            continue
        for done in (forwards[action], action) if action in forwards else (action,):
            clock.ended[done] = span.end
            for hop, target, seconds in sends.get((done.kind, done.stage), ()):
                _transfer(clock, schedule, done, hop, home, target, seconds)
    _reduce(clock, schedule, home, reductions)
    fixed = {name: sum(costs[s].fixed for s, d in enumerate(home) if d == name) for name in names}
    memory = tuple(_steps(clock.held[name], fixed[name]) for name in names)
    links = tuple(name for name in clock.free_at if name not in names)
    return Timeline(schedule.name, names, tuple(clock.spans), links, memory)


def recomputes(schedule: Schedule, cost: StageCost, s: int, i: int) -> bool:
    """Whether stage s runs micro-batch i forward a second time, before its backward."""
    if cost.keeps_at_once and at_once(schedule, s, i):
        return False
    return cost.checkpoint == "always" or (cost.checkpoint == "except_last" and i + 1 < schedule.chunks)


def _compute(clock: _Clock, schedule: Schedule, action: Action, device: str, cost: StageCost, ready: float) -> Span:
    """Run one action on its device, after its recomputation, and note the memory that they keep and free."""
    kind, s, i = action
    again = recomputes(schedule, cost, s, i)
    trains = Action("B", s, i) in schedule.place or Action("W", s, i) in schedule.place
    pieces = cost.pieces(s, again)
    if kind in "BI" and again:
        repeat = clock.run(device, 0.0, cost, Action("R", s, i))
        clock.keep(device, repeat.start, i, pieces.saved)
        if cost.kept is not None:
            clock.free(device, repeat.end, i, pieces.taken)
    ready = max(ready, clock.arrived.pop(action, 0.0))
    span = clock.run(device, ready, cost, action)
    if kind == "F" and trains:
        clock.keep(device, span.start, i, pieces.taken if again else pieces.saved)
    if kind == "I" and cost.kept is not None:
        clock.keep(device, span.end, i, pieces.handed)
        clock.free(device, span.end, i, pieces.saved)
    if kind in "BW":
        clock.free(device, span.end, i, pieces.saved if kind == "B" else pieces.handed)
    if kind in "BW" and again and cost.kept is None:
        clock.free(device, span.end, i, pieces.taken)
    return span


_Send = tuple[Hop, int, float]  # the hop, the stage it goes to, seconds


def _sends(hops: Sequence[Hop], home: Sequence[str]) -> dict[tuple[str, int], list[_Send]]:
    """What leaves after each kind of action of each stage. Between stages of one device nothing has to move."""
    sends: dict[tuple[str, int], list[_Send]] = {}
    for hop in hops:
        if home[hop.source] != home[hop.target]:
            sends.setdefault(("F", hop.source), []).append((hop, hop.target, hop.forward))
            for kind in "BI" if hop.backward else "":
                sends.setdefault((kind, hop.target), []).append((hop, hop.source, hop.backward))
    return sends


def _transfer(
    clock: _Clock, schedule: Schedule, action: Action, hop: Hop, home: Sequence[str], target: int, seconds: float
) -> None:
    """Move what the action has made for a hop, values or gradients; the action that takes it waits for its arrival."""
    kind, s, i = action
    link = f"{home[s]} -> {home[target]}"
    label = hop.label if kind == "F" else f"gradient of {hop.label}" if hop.label else "gradient"
    span = clock.occupy(link, clock.ended[action], seconds, Action("T", s, i), label)
    taker = Action(kind, target, i)
    if kind != "F":
        taker = taker._replace(kind="I" if Action("I", target, i) in schedule.place else "B")
    clock.arrived[taker] = max(clock.arrived.get(taker, 0.0), span.end)


def _reduce(clock: _Clock, schedule: Schedule, home: Sequence[str], reductions: Sequence[Reduction]) -> None:
    """Add up the gradients of each stage, after all backwards have been simulated."""
    last = {action.stage: action for row in schedule.devices for action in row if action.kind in "BW"}
    for one in reductions:
        if one.stage in last and one.seconds:
            action = last[one.stage]
            ready = clock.ended[action] - one.early
            clock.occupy(f"all-reduce of {home[one.stage]}", ready, one.seconds, action._replace(kind="A"), one.label)


def _steps(changes: Sequence[Change], fixed: int) -> Steps:
    """Bytes in use over time; changes at the same time are one step."""
    users: Counter[tuple[int, Piece]] = Counter()  # how often each piece of a micro-batch is kept
    now, found = fixed, {0.0: fixed}
    for at, i, memory, by in sorted(changes, key=lambda change: change.at):
        for piece, count in memory.items():
            key = (0 if piece[0] == WHOLE_INPUT else i), piece
            users[key] += by
            if users[key] == max(by, 0):  # the first that keeps it, or the last
                now += by * count
        found[at] = now
    return tuple(found.items())
