"""Where a model may be cut: what must stay together in one stage, and what crosses a cut.

Positions are op positions: a cut at p lies before op p, so that ops p - 1 and p are in two stages. A value defined at d
and last read at r crosses every cut p with d < p <= r.

    0  parts = x.chunk(2)        parts is a tuple: its readers are tied to it
    1  a = parts[0]
       ---------------- illegal
    2  b = parts[1]
       ---------------- legal: a and b cross
    3  y = a + b

Five things tie ops together: a value that cannot move (a tuple, an object); memory that has several live names and is
written under one of them; a buffer that the model changes; a vmap; and what the epilogue takes. A value with one live
name may be written in a later stage than the one that made it: that stage writes into a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from fxpipe.ir.once import once

from .graph import Graph, Op, called
from .shared_memory_values import shares
from .value_types import may_cross

Spans = Mapping[str, tuple[int, int]]
ENTER_VMAP, LEAVE_VMAP = "_vmap_increment_nesting", "_vmap_decrement_nesting"


@dataclass(frozen=True)
class Tie:
    """Ops `first` to `last`, by position, must be in one stage, because of the value or state `name`."""

    first: int
    last: int
    name: str
    reason: str


def legal_cuts(graph: Graph) -> tuple[bool, ...]:
    """For each position from 0 to the number of ops, whether a cut may lie before it; the two ends always may."""
    changes = [0] * (len(graph.ops) + 1)
    for first, last in glued(graph):
        changes[first + 1] += 1
        changes[last + 1] -= 1
    return tuple(count == 0 for count in accumulate(changes))


def glued(graph: Graph) -> tuple[tuple[int, int], ...]:
    """Spans of positions, (first, last) with both ends included, that no cut may enter: in order and disjoint."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted((tie.first, tie.last) for tie in ties(graph)):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        elif first < last:
            merged.append((first, last))
    return tuple(merged)


@once
def spans(graph: Graph) -> Spans:
    """For every input and every op's value: where it is defined (inputs at -1), and where an op last reads it.

    Outputs do not count as reads: an output goes straight from its stage to the caller."""
    defined = {item.name: -1 for item in graph.inputs} | {op.name: at for at, op in enumerate(graph.ops)}
    last = dict(defined)
    for at, op in enumerate(graph.ops):
        last.update((name, at) for name in op.reads if name in defined)
    return {name: (at, last[name]) for name, at in defined.items()}


@once
def ties(graph: Graph) -> tuple[Tie, ...]:
    """All that ties ops together, each with its reason."""
    span = spans(graph)
    of_values = (*_immovable(graph, span), *_shared_memory(graph, span))
    return (*of_values, *_changed_states(graph), *_vmaps(graph), *_of_epilogue(graph))


def _immovable(graph: Graph, span: Spans) -> Iterator[Tie]:
    types = graph.types
    for name, (defined, last) in span.items():
        if not may_cross(types[name]) and last > max(defined, 0):
            reason = f"{name} is {types[name]}, and only tensors and numbers move between stages"
            yield Tie(max(defined, 0), last, name, reason)


def _shared_memory(graph: Graph, span: Spans) -> Iterator[Tie]:
    """Where memory has several live names, the ops that name it and those that write it stay together, so that a write
    under one name is seen under the others."""
    made = {op.name: op for op in graph.ops}
    returned = {output.value for output in graph.outputs}

    def seen(name: str, at: int) -> bool:
        return name not in span or name in returned or span[name][1] >= at  # a state outlives the call

    for at, op in enumerate(graph.ops):
        names = [name for name in op.writes if seen(name, at)]
        values = [span[name] for name in names if name in span]
        alone = len(names) == 1 and not seen(names[0], at + 1)  # later ops know it by the name of this op
        if alone or not values:
            continue
        # Views between one of the names and another must be in the same stage, even if no later op reads them.
        behind = [_views_behind(name, made) for name in names]
        linked = (behind[0].union(*behind) - behind[0].intersection(*behind)) | set(names)
        first = min((span[name][0] for name in linked if name in made), default=at)
        # The stage writes a copy of the caller's memory: later readers of that input must be in the stage of the copy.
        last = max([at, *(read for defined, read in values if defined < 0)])
        yield Tie(first, last, names[0], f"{op.name} changes {', '.join(names)} in place, which others see")


def _views_behind(name: str, made: Mapping[str, Op]) -> set[str]:
    """The value and all values that it may be a view of, directly or through other views."""
    found, waiting = set[str](), [name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += (*shares(made[name]), *made[name].writes) if name in made else ()
    return found


def _changed_states(graph: Graph) -> Iterator[Tie]:
    paths = {state.name: state.path for state in graph.states}
    changed = {name for op in graph.ops for name in op.writes if name in paths}
    touched: dict[str, list[int]] = {}
    for at, op in enumerate(graph.ops):
        for name in (*op.reads, *op.writes):
            if name in changed:
                touched.setdefault(name, []).append(at)
    for name, places in touched.items():
        yield Tie(
            places[0], places[-1], name, f"{paths[name]} is changed in forward, so all that use it share one stage"
        )


def _of_epilogue(graph: Graph) -> Iterator[Tie]:
    """What the epilogue takes is given by the last stage, where the epilogue runs."""
    first = next((at for at, op in enumerate(graph.ops) if op.name in graph.taken), None)
    if first is not None:
        yield Tie(first, len(graph.ops) - 1, graph.ops[first].name, "the last stage gives what the whole batch needs")


def _vmaps(graph: Graph) -> Iterator[Tie]:
    """Entering and leaving a vmap changes a counter of the thread, so both must run in one stage."""
    for first, last in vmaps(graph.ops):
        yield Tie(first, last, graph.ops[first].name, "a vmap is entered and left in one stage")


def vmaps(ops: Iterable[Op]) -> Iterator[tuple[int, int]]:
    """The positions at which each vmap that is in no other one is entered and left."""
    depth, first = 0, 0
    for at, op in enumerate(ops):
        if called(op) == ENTER_VMAP:
            first = first if depth else at
            depth += 1
        elif called(op) == LEAVE_VMAP:
            depth -= 1
            if not depth:
                yield first, at
