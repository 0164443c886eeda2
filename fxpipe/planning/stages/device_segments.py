"""A graph with a device for every op, as segments: runs of ops that one device computes without waiting for another.

    device 0   a ─ b ─ c ┄┄┄┄┄┄┄┄┄┄┄ f ─ g          segments  a b c | d e | f g
    device 1       └── d ─ e ───────┘

Time is simulated with the ops' seconds. The device that can start first gets the next segment: all that it can compute
at that time, and what follows from that on the same device; ops that lead to another device soonest come first. A
segment gets all its inputs when it starts and sends all its outputs when it ends, so it also ends before an op that
would keep another device waiting for longer than `WORTH`. In backward inputs and outputs change roles, and the same
holds.

Where a strategy recomputes groups of operators, a segment has ops of one group only, or none that is recomputed; and a
device computes in the order of the graph, so that a group is in as few segments as possible.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import chain, pairwise
from math import inf

from fxpipe.errors import PlanError
from fxpipe.ir.graph.graph import Graph, Op
from fxpipe.ir.graph.legal_cuts import ties
from fxpipe.ir.graph.shared_memory_values import memory_of
from fxpipe.ir.operators.collective_patterns import CollectivePattern
from fxpipe.ir.operators.placed_graph import Placed

from .op_order import Edges, requirements

WORTH = 2e-4  # seconds: what it takes to end a segment, begin another, and wake up a worker


@dataclass(frozen=True)
class Segment:
    """Ops, by name and in the order they run, on device number `device`. `again`: whether they are recomputed."""

    device: int
    ops: tuple[str, ...]
    again: bool = False


def segments(
    placed: Placed, seconds: Mapping[str, float] | None = None, collectives: Sequence[CollectivePattern] = ()
) -> tuple[Segment, ...]:
    """The segments in an order in which they can run; those of a device run in this order. `seconds` is how long each
    op takes, 0 if not given: then segments are as few as possible. A device gives its part to one of `collectives` in
    an earlier segment than it takes what is made of it. Raises PlanError if ops that must run together are on several
    devices."""
    graph = placed.graph
    before = requirements(graph)
    position = {op.name: at for at, op in enumerate(graph.ops)}
    together = [made for one in collectives for made in one.made]
    together += [(part, *cuts) for one in collectives for part, cuts in zip(one.parts, one.cuts, strict=False)]
    pairs = [pair for names in together for pair in pairwise(map(position.__getitem__, names))]
    whole = blocks(graph, before, [*_made_of_nothing(placed, before), *pairs])
    _refuse_torn(graph, placed, whole)
    made = {position[op] for one in collectives for ops in one.made for op in ops}
    given = {position[op] for one in collectives for op in chain(one.parts, *one.cuts)}
    return _Turns(placed, before, whole, seconds or {}, made, given).taken()


# Ops that stay together -----------------------------------------------------------------------------------------------


def blocks(graph: Graph, before: Edges, also: Iterable[tuple[int, int]] = ()) -> list[tuple[int, ...]]:
    """All ops, by position, in blocks that run together on one device: tied ops, each pair of `also`, and ops between
    them by dependency. `before` are the `requirements` of the graph."""
    block_of = {at: {at} for at in range(len(graph.ops))}
    root = memory_of(graph)
    for tie in ties(graph):
        span = graph.ops[tie.first : tie.last + 1]
        touching = {at for at, op in enumerate(span, tie.first) if _touches(op, root[tie.name], root)}
        _join(block_of, {tie.first, tie.last} | touching)
    for pair in also:
        _join(block_of, set(pair))
    while loose := next((b for b in _distinct(block_of) if len(b) > 1 and _between(block_of, b, before) - b), None):
        _join(block_of, _between(block_of, loose, before))
    return [tuple(sorted(block)) for block in _distinct(block_of)]


def _made_of_nothing(placed: Placed, before: Edges) -> Iterator[tuple[int, int]]:
    """Pairs of an op that reads nothing, such as zeros for a first state, and its first reader, if both are on one
    device. By itself such an op would be a segment of its own, which is empty once stages compute such values again."""
    ops, devices = placed.graph.ops, placed.devices
    for at, op in enumerate(ops):
        users = (user for user in range(at + 1, len(ops)) if at in before[user])
        if not op.reads and (user := next(users, None)) and devices[ops[user].name] == devices[op.name]:
            yield at, user


def _join(block_of: dict[int, set[int]], members: set[int]) -> None:
    whole = set[int]().union(*(block_of[at] for at in members))
    block_of.update(dict.fromkeys(whole, whole))


def _distinct(block_of: Mapping[int, set[int]]) -> list[set[int]]:
    return [block for at, block in block_of.items() if min(block) == at]


def _touches(op: Op, wanted: str, root: Mapping[str, str]) -> bool:
    return any(root.get(name) == wanted for name in (op.name, *op.reads, *op.writes))


def _between(block_of: Mapping[int, set[int]], block: set[int], before: Edges) -> set[int]:
    """The block, and the ops between: each depends on an op of the block, and another op of the block depends on it."""
    first, last = min(block), max(block)
    after = set(block)
    for at in range(first, last + 1):
        if any(need in after for other in block_of[at] for need in before[other]):
            after |= block_of[at]
    needed = set(block)
    for at in range(last, first - 1, -1):
        if at in needed:
            needed |= {other for need in before[at] for other in block_of[need]}
    return block | (after & needed)


def _refuse_torn(graph: Graph, placed: Placed, blocks: Sequence[tuple[int, ...]]) -> None:
    for block in blocks:
        ops = [graph.ops[at] for at in block]
        other = next((op for op in ops if placed.devices[op.name] != placed.devices[ops[0].name]), None)
        if other is not None:
            tie = next((tie for tie in ties(graph) if tie.first in block and tie.last in block), None)
            reason = f": {tie.reason}" if tie else ""
            raise PlanError(
                f"op {ops[0].name}, at {ops[0].origin}, is on device {placed.devices[ops[0].name]} and op "
                f"{other.name}, at {other.origin}, on device {placed.devices[other.name]}, and they must run "
                f"together{reason}"
            )


# Turns ----------------------------------------------------------------------------------------------------------------


@dataclass
class _Turns:
    """Gives blocks to devices, segment by segment. A block is named by its first op.

    - `made`: ops that are in later segments than those that they read of `given`.
    - `free`: when each device is done, in seconds.
    - `ended`: when each block is done.
    - `ready`: for each device a heap of the blocks that may run, as (`way`, first op).
    """

    placed: Placed
    before: Edges
    blocks: Sequence[tuple[int, ...]]
    seconds: Mapping[str, float]
    made: Collection[int]
    given: Collection[int]
    free: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    ready: dict[int, list[tuple[float, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ops = self.placed.graph.ops
        self.device = [self.placed.devices[op.name] for op in ops]
        self.at = {block[0]: block for block in self.blocks}
        head = {at: block[0] for block in self.blocks for at in block}
        self.needs = {
            block[0]: {head[need] for at in block for need in self.before[at]} - {block[0]} for block in self.blocks
        }
        self.users: dict[int, list[int]] = {first: [] for first in self.at}
        for first, needs in self.needs.items():
            for need in needs:
                self.users[need].append(first)
        self.waits = {first: len(needs) for first, needs in self.needs.items()}
        self.cost = {
            first: sum(self.seconds.get(ops[at].name, 0.0) for at in block) for first, block in self.at.items()
        }
        groups = self.placed.groups
        names = {first: [ops[at].name for at in block] for first, block in self.at.items()}
        self.group = {first: next((groups[n] for n in block if n in groups), None) for first, block in names.items()}
        self.way = dict.fromkeys(self.at, 0.0) if groups else self.ways()
        for first, count in self.waits.items():
            if not count:
                self.offer(first)

    def ways(self) -> dict[int, float]:
        """For each block the seconds from its start until another device can get something that follows from it."""
        found: dict[int, float] = {}
        for first in reversed([*TopologicalSorter(self.needs).static_order()]):
            given = any(self.device[user] != self.device[first] for user in self.users[first])
            onward = 0.0 if given else min((found[user] for user in self.users[first]), default=inf)
            found[first] = self.cost[first] + onward
        return found

    def offer(self, first: int) -> None:
        """Make a block ready: all that it needs has been given to a segment."""
        heappush(self.ready.setdefault(self.device[first], []), (self.way[first], first))

    def taken(self) -> tuple[Segment, ...]:
        ops, found = self.placed.graph.ops, []
        while any(self.ready.values()):
            start, _, device = min(self.earliest(device) for device, heads in self.ready.items() if heads)
            taken = sorted(self.turn(device, start))
            again = any(self.group.get(at) not in (None, -1) for at in taken)
            found.append(Segment(device, tuple(ops[at].name for at in taken), again))
        return tuple(found)

    def earliest(self, device: int) -> tuple[float, int, int]:
        """(seconds, first op, device): when the device could start, and with which block."""
        start, first = min((self.arrival(first), first) for _, first in self.ready[device])
        return max(start, self.free.get(device, 0.0)), first, device

    def arrival(self, first: int) -> float:
        """When all that a block takes from other devices has arrived."""
        return max((self.ended[need] for need in self.taken_by(first)), default=0.0)

    def taken_by(self, first: int) -> list[int]:
        """The blocks of other devices that a block takes from."""
        return [need for need in self.needs[first] if self.device[need] != self.device[first]]

    def turn(self, device: int, start: float) -> list[int]:
        """The ops of the next segment: blocks that can run from `start` on, as long as no device waits too long."""
        now, given, group = start, inf, None
        taken, later = list[int](), list[int]()
        while self.ready[device]:
            _, first = heappop(self.ready[device])
            late = self.arrival(first) > start or self.begins(first, taken)
            keeps_values = now + self.cost[first] - given > WORTH
            keeps_gradients = now - start > WORTH and bool(self.taken_by(first))
            other = group is not None and self.group[first] not in (None, group)
            if late or keeps_values or keeps_gradients or other:
                later.append(first)
                continue
            group = self.group[first] if group is None else group
            now += self.cost[first]
            taken += self.at[first]
            self.ended[first] = now
            if any(self.device[user] != device for user in self.users[first]):
                given = min(given, now)
            self.release(first)
        for first in later:
            self.offer(first)
        self.free[device] = now
        for first in {at for at in taken if at in self.at}:  # all is given at the end
            self.ended[first] = now
        return taken

    def begins(self, first: int, taken: Collection[int]) -> bool:
        """Whether a block takes part in a collective that the ops `taken` so far for a segment give a part to."""
        needs = (need for at in self.at[first] if at in self.made for need in self.before[at] if need in self.given)
        return any(need in taken for need in needs)

    def release(self, first: int) -> None:
        """Make ready the blocks that waited only for this one."""
        for user in self.users[first]:
            self.waits[user] -= 1
            if not self.waits[user]:
                self.offer(user)
