"""The order in which the ops of a model run. Any order that keeps dependencies is right; in some, less crosses cuts.

    captured            by demand
    mask = ones(n)      a1 = conv(x)       the mask is made where it is used, and each branch runs
    a1 = conv(x)        a2 = conv(a1)      to its end, so that between the two one value is alive
    b1 = conv(x)        b1 = conv(x)       and not two
    a2 = conv(a1)       b2 = conv(b1)
    b2 = conv(b1)       mask = ones(n)
    y = where(mask, a2, b2)

"By demand" starts from the last op: an op runs just before its first user. An op without users (an update of a buffer)
runs just before its next op in the captured order. A tuple is unpacked at once. A vmap stays whole. The captured order
is the user's own, and is kept unless another is better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.legal_cuts import legal_cuts, vmaps
from fxpipe.ir.graph.shared_memory_values import memory_of
from fxpipe.ir.graph.value_types import may_cross
from fxpipe.ir.plan.profile import OpCost
from fxpipe.ir.program.cheap_ops import cheap_ops

from .cut_costs import traffic

Edges = Sequence[Sequence[int]]


def arrange(graph: Graph, costs: Mapping[str, OpCost]) -> Graph:
    """The graph with its ops in the order of least traffic: captured, cheap values late, or all by demand."""
    needs = requirements(graph)
    cheap = cheap_ops(graph)
    orders = [_by_demand(graph, needs, late) for late in (lambda name: name in cheap, lambda name: True)]
    others = [other for order in orders if (other := reorder(graph, order)) is not graph]
    best = graph
    least = _measure(graph, costs) if others else (0, 0, 0)
    for other in others:
        measure = _measure(other, costs)
        if all(ours <= theirs for ours, theirs in zip(measure, least, strict=True)) and measure != least:
            best, least = other, measure
    return best


def reorder(graph: Graph, order: Sequence[int]) -> Graph:
    """The graph with its ops in this order of their positions."""
    return graph if list(order) == sorted(order) else replace(graph, ops=tuple(graph.ops[p] for p in order))


def requirements(graph: Graph) -> list[list[int]]:
    """For each op, the ops that must run before it: those that make what it reads, and earlier ones that use the
    same memory, under any name, if either writes it. In a vmap each op needs the one before; what the vmap needs must
    run before it is entered, and what needs one of its ops runs after it is left."""
    made_at = {op.name: position for position, op in enumerate(graph.ops)}
    shared = _memory_names(graph)
    last_write: dict[str, int] = {}
    uses_since: dict[str, list[int]] = {}
    needs: list[list[int]] = []
    for position, op in enumerate(graph.ops):
        before = {made_at[name] for name in op.reads if name in made_at}
        for name in (*op.reads, *op.writes, op.name):
            if name not in shared:
                continue
            memory = shared[name]
            if memory in last_write:
                before.add(last_write[memory])
            if op.writes and memory in {shared[written] for written in op.writes}:
                before.update(uses_since.pop(memory, ()))
                last_write[memory] = position
            else:
                uses_since.setdefault(memory, []).append(position)
        needs.append(sorted(before - {position}))
    whole = tuple(vmaps(graph.ops))
    inside = {p: last for first, last in whole for p in range(first, last)}
    for first, last in whole:
        needs[first] = sorted({p for before in needs[first : last + 1] for p in before if p < first})
        needs[first + 1 : last + 1] = [[p] for p in range(first, last)]
    return [before if p - 1 in inside else sorted({inside.get(q, q) for q in before}) for p, before in enumerate(needs)]


def _memory_names(graph: Graph) -> dict[str, str]:
    """Every name whose memory some op writes, mapped to one name for all that may share that memory."""
    root = memory_of(graph)
    written = {root[name] for op in graph.ops for name in op.writes}
    return {name: one for name, one in root.items() if one in written}


def _measure(graph: Graph, costs: Mapping[str, OpCost]) -> tuple[int, int, int]:
    """How good an order is; less is better for each: the number of illegal cuts, and the maximum and the sum of bytes
    that cross a cut."""
    across = traffic(graph, costs)
    both = [there + back for there, back in zip(across.values, across.gradients, strict=True)]
    return legal_cuts(graph).count(False), max(both), sum(both)


def _by_demand(graph: Graph, needs: Edges, late: Callable[[str], bool]) -> list[int]:
    """Positions in order of demand: ops for which `late` holds wait for their first user, others keep their turn."""
    users: list[list[int]] = [[] for _ in needs]
    for position, before in enumerate(needs):
        for earlier in before:
            users[earlier].append(position)
    # An op asks for all that it needs, and for the op just before it if that one has no users. The op with the longest
    # chain before it comes first, so that values of short chains do not wait for it.
    asks: list[list[int]] = []
    depth: list[int] = []
    for position, before in enumerate(needs):
        wanted = [*before, *((position - 1,) if position and not users[position - 1] else ())]
        asks.append(sorted(wanted, key=lambda p: (-depth[p], p)))
        depth.append(1 + max((depth[p] for p in wanted), default=0))
    done = [False] * len(needs)
    order: list[int] = []

    def put(root: int) -> None:
        """Append `root` after all that it asks for, depth first; not recursive, as models are deeper than the stack."""
        stack = [root]
        while stack:
            at = stack[-1]
            missing = [] if done[at] else [p for p in asks[at] if not done[p]]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if not done[at]:
                done[at] = True
                order.append(at)
                if not may_cross(graph.ops[at].type):
                    stack.extend(p for p in reversed(users[at]) if all(done[q] for q in needs[p]))

    for position, op in enumerate(graph.ops):
        if position == len(needs) - 1 or not late(op.name):
            put(position)
    whole = dict(vmaps(graph.ops))
    inner = {p for first, last in whole.items() for p in range(first + 1, last + 1)}
    return [q for p in order if p not in inner for q in range(p, whole.get(p, p) + 1)]
