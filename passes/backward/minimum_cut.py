"""Which computations of forward run again in backward, so that keeping values and running again together cost least.

    x ── f ── a ── g ── b        backward needs a and b: keep a and run g again, or keep b, too

Each value has a node, and so has each computation. An edge from a computation to a value it makes costs what keeping
the value costs; an edge from the source to a computation costs what running it again does. A value that backward needs
is on the side of the sink, and a computation on that side pulls what it reads there. So each cut between source and
sink is a choice, and a minimum cut is the cheapest one (Chen et al., "Training deep nets with sublinear memory cost",
made exact as in AOTAutograd's partitioner).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx


@dataclass(frozen=True)
class Computation:
    """What forward computes at once. `price`: what running it again costs; None: it must not run again."""

    makes: tuple[str, ...]
    reads: tuple[str, ...]
    price: int | None


def run_again(
    computations: Sequence[Computation], needed: Collection[str], keeping: Mapping[str, int | None]
) -> frozenset[int]:
    """The places of the computations that run again. `keeping`: what keeping each value costs; None: it cannot be kept,
    so that what makes it has to run again. Of equally good choices, that with the fewest ones. Raises ValueError if
    there is no choice.

    >>> g = Computation(("b",), ("a",), 1)
    >>> run_again([Computation(("a",), ("x",), None), g], {"a", "b"}, {"x": 0, "a": 100, "b": 100})
    frozenset({1})
    """
    makers = {value: place for place, one in enumerate(computations) for value in one.makes}
    graph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    waiting, seen = list(needed), set(needed)
    for value in needed:
        graph.add_edge(value_node(value), "sink")  # an edge without a capacity cannot be cut
    while waiting:
        value = waiting.pop()
        place, cost = makers.get(value), keeping[value]
        maker = "source" if place is None else place
        graph.add_edge(maker, value_node(value), **({} if cost is None else {"capacity": cost}))
        if place is None or "source" in graph.pred.get(place, ()):
            continue
        one = computations[place]
        graph.add_edge("source", place, **({} if one.price is None else {"capacity": one.price}))
        for read in one.reads if one.price is not None else ():
            graph.add_edge(value_node(read), place)
            if read not in seen:
                seen.add(read)
                waiting.append(read)
    try:
        _, (_, again) = nx.minimum_cut(graph, "source", "sink")
    except nx.NetworkXUnbounded:
        raise ValueError("a value that is needed can neither be kept nor be computed again") from None
    return frozenset(node for node in again if isinstance(node, int))


def value_node(name: str) -> tuple[str]:
    return (name,)
