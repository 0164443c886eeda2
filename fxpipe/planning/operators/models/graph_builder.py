"""Builds an operator graph: operators are added one by one, each after those it reads."""

from __future__ import annotations

from fxpipe.ir.operators.operators import Operator, OperatorGraph, check


class Draft:
    """The operators so far.

    >>> from .operator_kinds import features, linear
    >>> draft = Draft()
    >>> x = draft(features("x", 8, 4))
    >>> y = draft(linear("fc", x, 2))
    >>> draft.graph("net").weights
    10
    """

    def __init__(self) -> None:
        self.operators: list[Operator] = []

    def __call__(self, operator: Operator) -> Operator:
        """Add the operator, and return it for others to read."""
        self.operators.append(operator)
        return operator

    def graph(self, name: str, element: int = 4, dtype: str = "f32") -> OperatorGraph:
        """The operators as a graph, checked; `element` and `dtype` are the graph's."""
        graph = OperatorGraph(name, tuple(self.operators), element, dtype)
        check(graph)
        return graph
