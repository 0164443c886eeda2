"""What leaps need: patterns and orders of operators. A pattern is the degrees of dimensions by their names, so that a
convolution and the pooling after it can be cut alike. In an order, operators that change together are neighbours."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import log2, prod
from typing import NamedTuple

import numpy as np

from fxpipe.ir.operators.operators import Operator

from .flat_arrays import Ints, Problem

Pattern = tuple[tuple[str, int], ...]  # names and degrees of the dimensions that are cut, and "holders"


class Patterns(NamedTuple):
    """Patterns and orders.

    - `row_for`: [pattern, i], the row of operator i that is most like the pattern.
    - `pattern_of`: [row], its pattern.
    - `order`: [o, x], the operator at position x of order o.
    - `block_first`, `block_after`: [o, x], where the block of this position begins and ends.
    """

    row_for: Ints
    pattern_of: Ints
    order: Ints
    block_first: Ints
    block_after: Ints


def patterns(p: Problem, operators: Sequence[Operator]) -> Patterns:
    """The patterns of all rows and the orders for leaps; `operators` are those that are placed."""
    rows = [[tuple(map(int, p.degrees[row])) for row in range(p.row_first[i], p.row_first[i + 1])] for i in range(p.n)]
    own = [[_pattern(one, row) for row in row_list] for one, row_list in zip(operators, rows, strict=True)]
    every = list(dict.fromkeys(pattern for one in own for pattern in one))
    number = {pattern: at for at, pattern in enumerate(every)}
    nearest: dict[Hashable, list[int]] = {}
    for patterns_of in map(tuple, own):
        if patterns_of not in nearest:
            nearest[patterns_of] = [_nearest(patterns_of, wanted) for wanted in every]
    row_for = [[int(p.row_first[i]) + at for at in nearest[tuple(one)]] for i, one in enumerate(own)]
    orders = [
        _blocks([""] * p.n),
        _blocks([one.weight_group for one in operators]),
        _blocks([(one.kind, one.sizes, one.weights) for one in operators]),
    ]
    return Patterns(
        np.array(row_for, np.int64).T.copy(),
        np.array([number[pattern] for one in own for pattern in one], np.int64),
        *(np.array([order[which] for order in orders], np.int64) for which in range(3)),
    )


def _pattern(operator: Operator, degrees: Sequence[int]) -> Pattern:
    *dimensions, holders = degrees
    pairs = zip(operator.output, dimensions, strict=False)
    named = [(dimension.name, degree) for dimension, degree in pairs] + [("holders", holders)]
    return tuple((name, degree) for name, degree in named if degree > 1)


def _nearest(own: Sequence[Pattern], wanted: Pattern) -> int:
    """The position in `own` of the pattern most like the one wanted: nearest in number of parts, then in degrees."""
    return min(range(len(own)), key=lambda at: _distance(dict(own[at]), dict(wanted)))


def _distance(a: Mapping[str, int], b: Mapping[str, int]) -> tuple[float, float]:
    apart = sum(abs(log2(a.get(name, 1)) - log2(b.get(name, 1))) for name in a.keys() | b.keys())
    return abs(log2(prod(a.values())) - log2(prod(b.values()))), apart


def _blocks(keys: Sequence[Hashable]) -> tuple[list[int], list[int], list[int]]:
    """Positions with equal keys next to each other, and where each one's block begins and ends."""
    where: dict[Hashable, list[int]] = {}
    for at, key in enumerate(keys):
        where.setdefault(key, []).append(at)
    order: list[int] = []
    first: list[int] = []
    after: list[int] = []
    for block in where.values():
        begin = len(order)
        order += block
        first += [begin] * len(block)
        after += [begin + len(block)] * len(block)
    return order, first, after
