"""The names of recorded values in generated code.

    linear_3 = addmm(bias, x, t)      the value of the stage's op h       h
    mm = mm(dy, weight)               the gradient of x                   dx
    t = t(weight)                     anything else                       t

Two stages never give one name to values of two types.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fxpipe.ir.graph.graph import Ref
from fxpipe.ir.graph.value_types import ValueType

if TYPE_CHECKING:
    from fxpipe.passes.backward.tracing.traces import Trace


def final_names(traced: Trace, known: Mapping[str, ValueType]) -> dict[str, str]:
    """The final names of recorded values: those of the stage's ops, and of gradients. Another stage may have a gradient
    of the same name and type: that of a value which moves between them."""
    made = {op.name for piece in traced.pieces for op in piece.ops}
    found: dict[str, str] = {}
    items: dict[tuple[str, int], str] = {}
    for piece in traced.pieces:
        for place, name in piece.results.items():
            if place is None and name in made and name not in found:
                found[name] = piece.op.name
            elif place is not None:
                items[piece.op.name, place] = name
        op = piece.op
        if op.target is operator.getitem and isinstance(op.args[0], Ref) and type(op.args[1]) is int:
            item = items.get((op.args[0].name, op.args[1]))
            if item in made and item not in found:
                found[item] = op.name
    taken = {*traced.types, *found.values()}
    for name, wish in traced.wishes.items():
        if name in found:
            continue
        free, number, kind = wish, 0, traced.types[name]
        while free in taken or known.get(free, kind) != kind:
            number += 1
            free = f"{wish}_{number}"
        taken.add(free)
        found[name] = free
    return found
