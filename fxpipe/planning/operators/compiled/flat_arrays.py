"""The search as flat arrays for the compiled core: `Problem` never changes; `State` is the task graph of one strategy
with its times, changed in place.

Letters:

- n: operators that are placed (those fed in are not); i and j are two of them.
- M: the most parts of an operator; k and m are parts.
- D: devices; E: edges.
- G: groups of shared weights; U: equal shares of a group's weights.
- R: groups of operators that are recomputed.

Every output has five dimensions here; missing ones have size 1. After them comes the summed dimension; its degree is
the number of holders, also where there is no such dimension and the holders are copies.

A task's slot is its key. The sum of region r is forward the all-reduce of partial sums, and backward that of the
gradients that readers give to the region's holders:

    part k of operator i, forward     2 i M + k
    sum of region r, forward          2 i M + M + r
    sum of region r, backward         (4 n - 2 i - 2) M + r
    part k, backward                  (4 n - 2 i - 1) M + k
    gathering of group g              4 n M + g

Messages along an edge lie in rows, one for each part that sends; rows of one edge and direction are
contiguous:

    forward_rows[e, k] .. forward_rows[e, k + 1]      what part k of the producer sends: to which parts, on which link
    backward_rows[e, m] .. backward_rows[e, m + 1]    the gradients that part m of the consumer sends back

A changed edge gets new rows at the end (`top`), and the old ones are garbage once the change is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.operators.operators import Operator, OperatorGraph
from fxpipe.ir.operators.strategy import Config, Strategy, summed_regions
from fxpipe.planning.operators.input_regions import needs
from fxpipe.planning.operators.message_links import links
from fxpipe.planning.operators.operator_costs import Cost, once, part
from fxpipe.planning.operators.strategy_space import configs
from fxpipe.planning.operators.task_graph import weight_groups, weight_shards

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Records = Any  # arrays of records, whose fields mypy does not know
RANK = 5


class Problem(NamedTuple):
    """What does not change during a search. A row is an operator cut by certain degrees; operator i has the rows
    `row_first[i] .. row_first[i + 1]`."""

    n: int
    parts: int  # M
    devices: int
    links: int
    groups: int
    shares: int  # U
    element: int
    sizes: Ints  # [n, 5]
    is_parameter: Ints  # [n, 5] whether weights are cut with this dimension; of the last, whether there is one
    source: Ints  # [E] producer
    target: Ints  # [E] consumer
    need: Ints  # [E, 5, 5] for each dimension of the producer: along, stride, before, window, divide
    out_first: Ints  # [n + 1] into out_edges
    out_edges: Ints
    in_first: Ints
    in_edges: Ints
    around_first: Ints  # all edges of an operator, in and out
    around_edges: Ints
    group: Ints  # [n], -1 without weights
    group_first: Ints  # [G + 1] into group_members
    group_members: Ints
    group_bytes: Floats
    link: Ints  # [D, D]
    latency: Floats  # [D, D]
    rate: Floats  # [D, D]
    row_first: Ints  # [n + 1]
    degrees: Ints  # [rows, 5] the last: holders of each region
    row_parts: Ints  # [rows]
    seconds_first: Ints  # [rows] into `seconds`
    seconds: Floats  # [kinds of devices, all parts of all rows, 2]
    device_kind: Ints  # [D]
    kept: Floats  # [all parts of all rows] bytes of activations, as `seconds`
    dropped: Floats  # [all parts of all rows] bytes that are there only while the operator's group is recomputed
    again_group: Ints  # [n] the group in which it is recomputed, -1 if it is not; groups are in the order of their ends
    before: Ints  # [n] how many groups end before the operator
    inside: Ints  # [E] whether both ends are recomputed in one group
    held_bytes: Floats  # [G] bytes that a share of the group's weights takes on a device that holds it
    room: Floats  # [D] bytes of memory
    overfull: Floats  # [1] seconds that count for a strategy that does not fit in memory
    choice_first: Ints  # [rows + 1] number of the row's first choice: one for each device that it can begin on
    micro_batches: int = 1
    simulations: int = 1  # of each proposal; more than one to measure their time


def _record(ints: str, floats: str) -> np.dtype[np.void]:
    fields = [*((name, np.int32) for name in ints.split()), *((name, np.float64) for name in floats.split())]
    return np.dtype(fields, align=True)


# Fields that end in "_" have the values of the proposal that is being tried.
TASK = _record("place waits", "span ready start end ready_ start_ end_")
ARRIVAL = _record("pending", "latest")  # what a task still waits for, and when the last of it came
# wire: the link, -1 within a device; lasts: its seconds; size: bytes
MESSAGE = _record("peer wire", "lasts begin begin_ size")
EXTENT = _record("", "first_ready last_ready first_end last_end")
SYNC = _record("wire", "lasts begin begin_")  # lasts: 0 where nothing is passed on
# load: seconds of all its tasks; left: of those not yet begun; held: bytes of its parts and weights
DEVICE = _record("", "load load_ left free held held_")
EVENT = np.dtype([("time", np.float64), ("key", np.int64)])


class State(NamedTuple):
    """The task graph of one strategy and when its tasks are done."""

    row: Ints  # [n]
    task: Records  # [slots + G]
    arrival: Records  # [slots + G]
    extent: Records  # [2, n] forward and backward
    ring: Records  # [2 n, M] what devices pass on in the sums of regions, forward and then backward
    forward_rows: Ints  # [E, M + 1]
    backward_rows: Ints  # [E, M + 1]
    message: Records  # [capacity]
    cover: Ints  # [G, D, U] how many parts on the device hold the share
    held: Ints  # [G, U] how many devices hold the share
    summands: Ints  # [G, U] how many gradients are added up for it, those of copies once
    sync: Records  # [G, D]
    device: Records  # [D]
    again: Floats  # [D, R + 1] bytes that are there only while a group is recomputed
    again_: Floats
    since: Floats  # [D, R + 1] by `before`: those of `held` that are not of weights
    since_: Floats
    link_free: Floats  # [links]
    link_load: Floats  # [links] seconds of all messages
    link_load_: Floats
    queue: Records  # [slots + G]
    old_forward: Ints  # [most edges of an operator, M + 1] to take back
    old_backward: Ints
    old_sync: Records  # [D]
    old_place: Ints  # [M]
    old_span: Floats  # [2 M]
    volume: Floats  # [M M] scratch: elements that a part reads of a region
    pair: Ints  # [2, M M] scratch: regions that parts read, and the holders that they read from
    pair_first: Ints  # [M + 1] scratch
    counted: Ints  # [M + 1] scratch
    scratch: Ints  # [5, 6]
    top: Ints  # [1] end of the rows in use
    cost: Floats  # [1] seconds of the strategy


def problem(
    graph: OperatorGraph,
    cluster: Cluster,
    cost: Cost,
    starts: Sequence[Strategy] = (),
    roles: str = "SAP",
    copies: float = 0.0,
    micro_batches: int = 1,
) -> Problem:
    """The search as arrays, for one of this many micro-batches, of which `graph` is one; nothing is recomputed yet
    (`recompute_arrays.py`). Dimensions of these `roles` may be cut. Degrees of the strategies `starts` are added to
    those of `strategy_space.configs`. `copies` is how many bytes are in memory for each byte of weights. Raises
    ValueError for an operator of more than five dimensions."""
    placed = [at for at, operator in enumerate(graph) if operator.kind != "input"]
    number = {at: i for i, at in enumerate(placed)}
    operators = [graph.operators[at] for at in placed]
    for operator in operators:
        if len(operator.output) > RANK:
            raise ValueError(f"operator {operator.name!r} has {len(operator.output)} dimensions; {RANK} are the most")
    devices = len(cluster.devices)
    rows = [
        _rows(operator, devices, roles, [s.configs[at] for s in starts])
        for at, operator in zip(placed, operators, strict=True)
    ]
    edges = [(i, j, which) for i, j, which in graph.edges if i in number]
    ends = [(number[i], number[j]) for i, j, _ in edges]
    groups = [[number[at] for at in group] for group in weight_groups(graph).values()]
    group_of = {i: g for g, group in enumerate(groups) for i in group}
    wires = links(cluster)
    kinds = list(dict.fromkeys(d.speeds for d in cluster.devices))
    seconds_first, seconds = _seconds(graph, cluster, once(cost), operators, rows)
    out_first, out_edges = _grouped(len(placed), [i for i, _ in ends])
    in_first, in_edges = _grouped(len(placed), [j for _, j in ends])
    around_first, around = _grouped(len(placed), [end for both in ends for end in both])
    shards = [weight_shards(operator, row)[0] for operator, own in zip(operators, rows, strict=True) for row in own]
    parts = sum(row.parts for own in rows for row in own)
    return Problem(
        n=len(placed),
        parts=max(devices, max(row.parts for own in rows for row in own)),
        devices=devices,
        links=max(1, len(wires.names)),
        groups=len(groups),
        shares=lcm(*shards),
        element=graph.element,
        sizes=_ints([[*_padded(o.sizes), max(1, o.summed)] for o in operators]),
        is_parameter=_ints([[*_padded([role == "P" for role in o.roles], 0), o.summed > 0] for o in operators]),
        source=_ints([i for i, _ in ends]),
        target=_ints([j for _, j in ends]),
        need=_ints([_need(graph, j, which) for _, j, which in edges]).reshape(-1, RANK, 5),
        out_first=out_first,
        out_edges=out_edges,
        in_first=in_first,
        in_edges=in_edges,
        around_first=around_first,
        around_edges=around // 2,
        group=_ints([group_of.get(i, -1) for i in range(len(placed))]),
        group_first=_ints(np.cumsum([0, *map(len, groups)])),
        group_members=_ints([i for group in groups for i in group]),
        group_bytes=np.array([operators[group[0]].weights * graph.element for group in groups], np.float64),
        link=_ints(wires.number),
        latency=np.array(wires.latency, np.float64),
        rate=np.array(wires.bandwidth, np.float64),
        row_first=_ints(np.cumsum([0, *map(len, rows)])),
        degrees=_ints([[*_padded(row.degrees), row.holders] for own in rows for row in own]),
        row_parts=_ints([row.parts for own in rows for row in own]),
        seconds_first=seconds_first,
        seconds=seconds,
        choice_first=_ints(np.cumsum([0, *(max(0, devices + 1 - row.parts) for own in rows for row in own)])),
        device_kind=_ints([kinds.index(d.speeds) for d in cluster.devices]),
        kept=np.zeros(parts),
        dropped=np.zeros(parts),
        again_group=np.full(len(placed), -1),
        before=np.zeros(len(placed), np.int64),
        inside=np.zeros(len(edges), np.int64),
        held_bytes=np.array([copies * operators[group[0]].weights * graph.element for group in groups], np.float64)
        / lcm(*shards),
        room=np.full(devices, np.inf),
        overfull=np.zeros(1),
        micro_batches=micro_batches,
    )


def _rows(operator: Operator, devices: int, roles: str, more: Iterable[Config]) -> list[Config]:
    """The degrees and holders that the operator may have, each once."""
    return list(dict.fromkeys(replace(config, devices=()) for config in (*configs(operator, devices, roles), *more)))


def _seconds(
    graph: OperatorGraph, cluster: Cluster, cost: Cost, operators: list[Operator], rows: list[list[Config]]
) -> tuple[Ints, Floats]:
    """Where each row's seconds begin, and the seconds of each part (forward, backward) on each kind of device."""
    kinds = list({d.speeds: d for d in cluster.devices}.values())
    first, found = [], [[] for _ in kinds]  # type: ignore[var-annotated]
    known: dict[Any, list[list[tuple[float, float]]]] = {}
    for operator, own in zip(operators, rows, strict=True):
        for row in own:
            first.append(len(found[0]))
            likeness = part(graph, operator, tuple((0, size) for size in operator.sizes)), row
            if likeness not in known:
                parts = [part(graph, operator, r) for r in summed_regions(operator, row)]
                known[likeness] = [[cost(one, device) for one in parts] for device in kinds]
            for kind, seconds in zip(found, known[likeness], strict=True):
                kind.extend(seconds)
    return _ints(first), np.array(found, np.float64)


def _need(graph: OperatorGraph, consumer: int, which: int) -> list[tuple[int, ...]]:
    found = needs(graph, graph.operators[consumer], which)
    last = len(graph.operators[consumer].output)
    along = [RANK if n.along == last else n.along for n in found]
    own: list[tuple[int, ...]] = [
        (at, n.stride, n.before, n.window, n.divide) for at, n in zip(along, found, strict=True)
    ]
    return own + [(-1, 1, 0, 1, 1)] * (RANK - len(own))


def _padded(numbers: Iterable[Any], with_: int = 1) -> list[int]:
    found = [int(number) for number in numbers]
    return found + [with_] * (RANK - len(found))


def _grouped(n: int, keys: list[int]) -> tuple[Ints, Ints]:
    """For each key below n where its positions begin, and the positions sorted by key."""
    order = np.argsort(np.array(keys, np.int64), kind="stable")
    first = np.zeros(n + 1, np.int64)
    np.add.at(first, np.array(keys, np.int64) + 1, 1)
    return np.cumsum(first), order.astype(np.int64)


def _ints(numbers: Any) -> Ints:
    return np.array(numbers, np.int64)


def state(p: Problem, capacity: int, groups: int = 1) -> State:
    """An empty state with room for `capacity` messages, and for this many groups that are recomputed."""
    slots, edges = 4 * p.n * p.parts, len(p.source)
    most = int(max(np.diff(p.out_first) + np.diff(p.in_first), default=0))
    weights = max(1, p.groups)

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    def floats(*shape: int) -> Floats:
        return np.zeros(shape, np.float64)

    return State(
        row=ints(p.n),
        task=np.zeros(slots + p.groups, TASK),
        arrival=np.zeros(slots + p.groups, ARRIVAL),
        extent=np.zeros((2, p.n), EXTENT),
        ring=np.zeros((2 * p.n, p.parts), SYNC),
        forward_rows=ints(edges, p.parts + 1),
        backward_rows=ints(edges, p.parts + 1),
        message=np.zeros(capacity, MESSAGE),
        cover=ints(weights, p.devices, p.shares),
        held=ints(weights, p.shares),
        summands=ints(weights, p.shares),
        sync=np.zeros((weights, p.devices), SYNC),
        device=np.zeros(p.devices, DEVICE),
        again=floats(p.devices, groups + 1),
        again_=floats(p.devices, groups + 1),
        since=floats(p.devices, groups + 1),
        since_=floats(p.devices, groups + 1),
        link_free=floats(p.links),
        link_load=floats(p.links),
        link_load_=floats(p.links),
        queue=np.zeros(slots + p.groups + 1, EVENT),
        old_forward=ints(most, p.parts + 1),
        old_backward=ints(most, p.parts + 1),
        old_sync=np.zeros(p.devices, SYNC),
        old_place=ints(p.parts),
        old_span=floats(2 * p.parts),
        volume=floats(p.parts * p.parts),
        pair=ints(2, p.parts * p.parts),
        pair_first=ints(p.parts + 1),
        counted=ints(p.parts + 1),
        scratch=ints(5, RANK + 1),
        top=ints(1),
        cost=floats(1),
    )
