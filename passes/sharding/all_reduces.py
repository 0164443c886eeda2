"""Over ranks, sums of which each device of a group makes a part, and which all of them need, are all-reduces.

    before   stage 0 on cpu:0  gives y_partial            stage 2 on cpu:0  y_sum = y_partial + y_partial_0
             stage 1 on cpu:1  gives y_partial_0          stage 3 on cpu:1  y_sum_0 = y_partial + y_partial_0
             four moves, two of them messages
    after    stage 0 on cpu:0  gives y_sum, a part        stage 2 on cpu:0  takes y_sum, the sum
             stage 1 on cpu:1  gives y_sum_0, a part      stage 3 on cpu:1  takes y_sum_0, the sum
             two moves within devices, which are one all-reduce

Backward of it is an all-reduce, too: the gradient of a part is that of the sum, which is made of what all users of the
sum add to it. What is no such pattern stays a message.
"""

from __future__ import annotations

from dataclasses import replace

from fxpipe.ir.graph.graph import rename
from fxpipe.ir.program.program import AllReduce, Move, Program
from fxpipe.passes.connect_stages import wire
from fxpipe.passes.pass_context import PassContext


def all_reduces(program: Program, context: PassContext) -> Program:
    """The program in which `context.sums` are all-reduces, as far as parts are made in earlier stages than sums."""
    maker = {op.name: stage.index for stage in program.stages for op in stage.ops}
    of_value: dict[str, set[tuple[int, int]]] = {}
    for move in program.moves:
        of_value.setdefault(move.value, set()).add((move.source, move.target))
    names, dropped, added, found = dict[str, str](), set[str](), list[Move](), list[AllReduce]()
    for one in context.sums:
        sources, targets = ([maker.get(name, -1) for name in some] for some in (one.parts, one.sums))
        whole = all({maker.get(name) for name in adds} == {at} for adds, at in zip(one.adds, targets, strict=True))
        straight = all(
            of_value.get(part) == {(source, target) for target in targets}
            for part, source in zip(one.parts, sources, strict=True)
        )
        apart = all(
            0 <= a < b and program.stages[a].devices == program.stages[b].devices
            for a, b in zip(sources, targets, strict=True)
        )
        if not (whole and straight and apart) or len({*sources, *targets}) < 2 * len(sources):
            continue
        moves = tuple(map(Move, one.sums, sources, targets))
        names |= dict(zip(one.parts, one.sums, strict=True))
        dropped.update(*one.adds)
        added += moves
        found.append(AllReduce(moves))
    if not found:
        return program
    ops = [tuple(rename(op, names) for op in stage.ops if op.name not in dropped) for stage in program.stages]
    kept = [move for move in program.moves if move.value not in names]
    return replace(wire(program, ops, [*kept, *added]), sums=tuple(found))
