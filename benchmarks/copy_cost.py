"""What devices move in memory to cut, join and add up what parts give each other: work that no part's own time has.

    forward    a part that reads from several parts joins the pieces: it reads and writes all of them
    backward   a part of whose output another reads a piece gets a gradient for that piece: it is put into zeros of the
               whole; and where several read of it, their gradients are added up

The SOAP paper's copies are made by the runtime beside the devices. A CPU worker makes them itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Strategy, regions
from fxpipe.planning.operators.input_regions import volume
from fxpipe.planning.operators.task_graph import Key, overlaps


def handling(graph: OperatorGraph, strategy: Strategy) -> Mapping[Key, float]:
    """Bytes read and written, by the key of the task (see `tasks`) that has to."""
    moved: dict[Key, float] = {}
    uses: dict[tuple[int, int], int] = {}
    last = len(graph) - 1
    parts = [
        [volume(region) for region in regions(operator, config)]
        for operator, config in zip(graph, strategy.configs, strict=True)
    ]
    for i, j, which in graph.edges:
        if graph.operators[i].kind == "input":
            continue
        pieces: dict[int, list[int]] = {}
        for k, m, elements in overlaps(graph, graph.operators[j], which, strategy.configs[i], strategy.configs[j]):
            pieces.setdefault(m, []).append(elements)
            uses[i, k] = uses.get((i, k), 0) + 1
            if elements < parts[i][k]:
                _add(moved, (1, last - i, k), parts[i][k] + 2 * elements)
        for m, read in pieces.items():
            if len(read) > 1:
                _add(moved, (0, j, m), 2 * sum(read))
    for (i, k), count in uses.items():
        if count > 1:
            _add(moved, (1, last - i, k), 3 * (count - 1) * parts[i][k])
    return {key: elements * graph.element for key, elements in moved.items()}


def _add(moved: dict[Key, float], key: Key, elements: float) -> None:
    moved[key] = moved.get(key, 0.0) + elements
