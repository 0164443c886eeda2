"""What is recomputed, as arrays for the compiled core: seconds of backward, bytes that are kept, and bytes that are
there only while a group is recomputed. They can be changed between two strategies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import Config
from fxpipe.planning.operators.strategy_memory import PartBytes, bytes_of, group_ends, leaving

from .flat_arrays import RANK, Floats, Problem


class RecomputeArrays:
    """The arrays of a problem that depend on what is recomputed."""

    def __init__(self, graph: OperatorGraph, placed: Sequence[int], p: Problem) -> None:
        self.graph, self.placed, self.problem = graph, placed, p
        self.backward: Floats = p.seconds[:, :, 1].copy()
        self.bytes = self._bytes()
        self.groups: tuple[tuple[str, ...], ...] | None = None

    def _bytes(self) -> list[list[list[PartBytes]]]:
        """Of each operator, each row, each part."""
        p, found = self.problem, []
        for i, at in enumerate(self.placed):
            operator = self.graph.operators[at]
            rank, rows = len(operator.output), range(p.row_first[i], p.row_first[i + 1])
            degrees = [tuple(map(int, p.degrees[row])) for row in rows]
            found.append([bytes_of(self.graph, operator, Config(one[:rank], (), one[RANK])) for one in degrees])
        return found

    def set(self, groups: tuple[tuple[str, ...], ...]) -> None:
        """Recompute these groups of operators, by name, and nothing else."""
        if groups == self.groups:
            return
        p, self.groups = self.problem, groups
        ends = group_ends(self.graph, groups)
        order = sorted(range(len(groups)), key=ends.__getitem__)
        group_of = {name: number for number, at in enumerate(order) for name in groups[at]}
        outside = leaving(self.graph, groups)
        operators = [self.graph.operators[at] for at in self.placed]
        p.again_group[:] = [group_of.get(operator.name, -1) for operator in operators]
        p.before[:] = [sum(end < at for end in ends) for at in self.placed]
        p.inside[:] = (p.again_group[p.source] == p.again_group[p.target]) & (p.again_group[p.source] >= 0)
        p.seconds[:, :, 1] = self.backward
        for i, operator in enumerate(operators):
            parts = [part for row in self.bytes[i] for part in row]
            first = p.seconds_first[p.row_first[i]]
            own = slice(first, first + len(parts))
            sizes = np.array([part.activations(self.graph.kept) for part in parts])
            p.kept[own], p.dropped[own] = sizes, 0.0
            if operator.name in group_of:
                inner = [group_of.get(name) == group_of[operator.name] for name in operator.inputs]
                p.kept[own] = [part.when_recomputed(operator.name in outside, inner) for part in parts]
                p.dropped[own] = np.maximum(0.0, sizes - p.kept[own])
                p.seconds[:, own, 1] += p.seconds[:, own, 0]
