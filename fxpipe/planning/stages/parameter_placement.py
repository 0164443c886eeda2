"""A later capture of a model (another mode, other inputs) is cut so that ops run where their parameters are.

A graph with the ops of the first one, but without those of the loss, has the first plan without these. Any other graph
is planned as follows.

The first plan gave every parameter a home: the first stage that uses it. In a later graph an op runs in the home of its
parameters (if they have several: where most of their bytes are), unless it depends on an op of a later stage: values
only move forward, so it runs in that stage and borrows the parameters. Between ops with such a place, cuts are free,
and balanced. All stages of the first plan stay, also without ops: the schedule is for all of them, and parameters are
lent by them. Memory is not checked, since the first plan has decided where the parameters live.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.graph.graph import Graph, State
from fxpipe.ir.graph.legal_cuts import vmaps
from fxpipe.ir.graph.value_types import nbytes
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.plan.plan import Plan, StagePlan, stage_of
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.program.cheap_ops import cheap_ops

from .balance import Cuts, balance
from .cut_costs import stage_costs
from .op_order import Edges, arrange, reorder, requirements
from .plan_stages import check_request, inner_cuts, stages
from .sample_cuts import replica_cuts


@dataclass(frozen=True)
class Placement:
    """What the first build of a pipe decides for the later ones: its plan, and what that is for.

    - `stages`: the stage of each parameter and buffer, by its path.
    - `graph`, `sizes`, `profile`: as in `Build`.
    """

    plan: Plan
    stages: Mapping[str, int]
    graph: Graph
    sizes: Mapping[str, int]
    profile: Profile

    def plan_of(self, graph: Graph) -> Plan | None:
        """The plan without the ops that `graph` does not have; None unless its ops are the first ones of this graph."""
        if not self._begins_with(graph):
            return None
        names = {op.name for op in graph.ops}
        stages = (replace(stage, ops=tuple(op for op in stage.ops if op in names)) for stage in self.plan.stages)
        return replace(self.plan, model=graph.model, stages=tuple(stages))

    def profile_of(self, graph: Graph, sizes: Mapping[str, int]) -> Profile | None:
        """The profile of these ops, in micro-batches of the same sizes; None as for `plan_of`, or for other sizes."""
        if not sizes.items() <= self.sizes.items() or not self._begins_with(graph):
            return None
        return self.profile.first(len(graph.ops))

    def _begins_with(self, graph: Graph) -> bool:
        """Whether the ops of `graph` are the first ones here."""
        first, n = self.graph, len(graph.ops)
        known = {state.name: state for state in first.states}
        if graph.states is not first.states and any(known.get(state.name) != state for state in graph.states):
            return False
        return {*graph.inputs} <= {*first.inputs} and first.ops[:n] == graph.ops


def homes(graph: Graph, plan: Plan) -> dict[str, int]:
    """The home of each parameter and buffer, by its path in the model: the first stage that uses it."""
    paths = {state.name: state.path for state in graph.states if state.kind != "constant"}
    stage = stage_of(plan)
    found: dict[str, int] = {}
    for op in graph.ops:
        for name in (*op.reads, *op.writes):
            if name in paths:
                found[paths[name]] = min(stage[op.name], found.get(paths[name], stage[op.name]))
    return found


def owners(placed: Placed, labels: Sequence[str], known: Mapping[str, str] | None) -> dict[str, str]:
    """The label of the device that owns each parameter and buffer, by its path, where ops are placed one by one and
    each device is a process: of a parameter the one with the least to own so far among those that use it, of a buffer,
    or what forward writes, the first one. `known`: what the first call has decided, where the first device owns all
    that no op used; None at the first call."""
    if known is not None:
        return {state.path: known.get(state.path, labels[0]) for state in placed.graph.states}
    users: dict[str, list[int]] = {}
    for op in placed.graph.ops:
        for name in (*op.reads, *op.writes):
            users.setdefault(name, []).append(placed.devices[op.name])
    written = {name for op in placed.graph.ops for name in op.writes}
    by_path: dict[str, list[State]] = {}
    for state in placed.graph.states:
        by_path.setdefault(state.path, []).append(state)
    found, owned = dict[str, str](), dict.fromkeys(labels, 0)
    for path, states in by_path.items():
        devices = sorted({device for state in states for device in users.get(state.name, ())})
        if devices and states[0].kind != "constant":
            fixed = states[0].kind == "buffer" or any(state.name in written for state in states)
            least = devices[0] if fixed else min(devices, key=lambda device: owned[labels[device]])
            found[path] = labels[least]
            owned[labels[least]] += max(nbytes(state.type, {}) for state in states)
    return found


def plan_like(
    graph: Graph,
    homes: Mapping[str, int],
    first: Plan,
    profile: Profile,
    cluster: Cluster,
    uncut: Collection[str] = (),
) -> Plan:
    """A plan for `graph` on the stages of `first`, with ops where their parameters are. `homes` maps the path of a
    parameter or buffer to a stage of `first`; others may go anywhere. `uncut` as for `plan`."""
    labels = [stage.device for stage in first.stages]
    check_request(graph, profile, cluster, labels, first.chunks)
    captured, graph = graph, arrange(graph, {cost.name: cost for cost in profile.ops})
    pins = _pins(graph, homes)
    places, pinned = _places(graph, pins)
    order = sorted(range(len(graph.ops)), key=lambda p: (places[p], p))
    graph = reorder(graph, order)
    fixed = [(at, places[p]) for at, p in enumerate(order) if pinned[p]]
    legal = inner_cuts(graph)
    needed = sorted({stage for _, stage in fixed}) or [0]
    # All stages; only those that have ops in place; as many as possible, with ops anywhere.
    choices = (range(len(labels)), fixed), (needed, fixed), (range(min(len(labels), len(legal) + 1)), ())
    for used, some in choices:
        chosen = [first.stages[s] for s in used]
        positions = replica_cuts(graph, legal, [len(stage.devices) for stage in chosen], uncut)
        allowed, moved = _allowed(used, some, positions, len(graph.ops))
        if moved and len(used) > len(needed):
            continue  # better without a stage that would take ops from where their parameters are
        cuts = _cuts(graph, profile, cluster, chosen, first.chunks, allowed)
        if cuts is not None:
            devices, modes = [stage.device for stage in chosen], [stage.checkpoint for stage in chosen]
            ops = {s: own.ops for s, own in zip(used, stages(captured, graph, cuts, devices, modes), strict=True)}
            made = (replace(stage, ops=ops.get(s, ())) for s, stage in enumerate(first.stages))
            return replace(first, model=graph.model, stages=tuple(made))
    raise AssertionError("one stage is always possible")


def stages_like(graph: Graph, homes: Mapping[str, int]) -> dict[str, int]:
    """The stage of each op of a later graph, where values may go back to an earlier stage: the home of its parameters,
    else that of the last op that it reads. `homes` as for `plan_like`."""
    found: dict[str, int] = {}
    for op, pin in zip(graph.ops, _pins(graph, homes), strict=True):
        read = [found[name] for name in op.reads if name in found]
        found[op.name] = pin if pin is not None else max(read, default=0)
    return found


def _pins(graph: Graph, homes: Mapping[str, int]) -> list[int | None]:
    """For each op the home of most bytes of its parameters and buffers, None if it has none."""
    states = {s.name: (nbytes(s.type, {}), homes[s.path]) for s in graph.states if s.path in homes}
    pins: list[int | None] = []
    for op in graph.ops:
        there: Counter[int] = Counter()
        for name in {*op.reads, *op.writes} & states.keys():
            size, stage = states[name]
            there[stage] += size
        pins.append(min(there, key=lambda stage: (-there[stage], stage)) if there else None)
    return pins


def _places(graph: Graph, pins: Sequence[int | None]) -> tuple[list[int], list[bool]]:
    """For each op the first stage that it could be in, and whether it must be in that one. Ops that depend on sizes
    alone go to the stage of their first user."""
    needs: Edges = requirements(graph)
    places: list[int] = []
    pinned: list[bool] = []
    ends = {last: first for first, last in vmaps(graph.ops)}
    for at, (before, pin) in enumerate(zip(needs, pins, strict=True)):
        earliest = max((places[p] for p in before), default=0)
        pinned.append(pin is not None and pin >= earliest)
        places.append(earliest if pin is None else max(pin, earliest))
        if at in ends:  # each op of a vmap needs the one before, so the last one's place is the latest
            places[ends[at] :] = [places[at]] * (at + 1 - ends[at])
    latest = [max(places)] * len(places)
    cheap = cheap_ops(graph)
    for at in reversed(range(len(places))):
        if graph.ops[at].name in cheap:
            places[at] = max(places[at], latest[at])
        for p in needs[at]:
            latest[p] = min(latest[p], places[at])
    return places, pinned


def _allowed(
    used: Sequence[int], fixed: Sequence[tuple[int, int]], legal: Sequence[Sequence[int]], n: int
) -> tuple[list[list[int]], bool]:
    """For each inner cut the legal positions that leave all fixed ops on their side of it; if there are none, the
    nearest legal one. And whether there are none for any cut."""
    allowed, moved = [], False
    for stage, positions in zip(used[1:], legal, strict=True):
        first = 1 + max((at for at, place in fixed if place < stage), default=0)
        last = min((at for at, place in fixed if place >= stage), default=n)
        between = [p for p in positions if first <= p <= last]
        moved |= not between
        allowed.append(between or sorted(positions, key=lambda p: (max(first - p, p - last), p))[:1])
    return allowed, moved


def _cuts(
    graph: Graph,
    profile: Profile,
    cluster: Cluster,
    chosen: Sequence[StagePlan],
    chunks: int,
    allowed: Sequence[Sequence[int]],
) -> Cuts | None:
    devices, modes = [stage.device for stage in chosen], [stage.checkpoint for stage in chosen]
    further = [stage.replicas for stage in chosen]
    costs = stage_costs(graph, profile, cluster, devices, modes, chunks, further=further)
    endless = sum(stage.bytes[-1] + max(stage.hold) for stage in costs)
    return balance([replace(stage, room=endless) for stage in costs], allowed)
