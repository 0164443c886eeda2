"""Over ranks, what all devices of a group make of parts that each of them has becomes one collective of the group.

    before   stage 0 on cpu:0  gives y_partial            stage 2 on cpu:0  y_sum = y_partial + y_partial_0
             stage 1 on cpu:1  gives y_partial_0          stage 3 on cpu:1  y_sum_0 = y_partial + y_partial_0
             four moves, two of them messages
    after    stage 0 on cpu:0  gives y_partial            stage 2 on cpu:0  takes y_sum
             stage 1 on cpu:1  gives y_partial_0          stage 3 on cpu:1  takes y_sum_0
             two moves within devices, which are one all-reduce

So are a slice of the sum for each device (a reduce-scatter), and a whole whose slices devices have (an all-gather).

Backward, too: gradients of a whole that all have are added up, and those of slices are joined. What is no such pattern
stays a message, such as unequal slices, or a whole that some devices of a group need.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from fxpipe.ir.graph.graph import Op
from fxpipe.ir.program.program import Collective, Move, Program
from fxpipe.passes.connect_stages import wire
from fxpipe.passes.pass_context import PassContext


def collectives(program: Program, context: PassContext) -> Program:
    """The program in which `context.collectives` are collectives, as far as parts are made in earlier stages than what
    is made of them."""
    maker = {op.name: stage.index for stage in program.stages for op in stage.ops}
    dropped, found = set[str](), list[Collective]()
    for one in context.collectives:
        sources, targets = ([maker.get(name, -1) for name in some] for some in (one.parts, one.results))
        inner = zip((*one.made, *one.cuts), (*targets, *sources), strict=False)
        whole = all({maker.get(name) for name in names} == {at} for names, at in inner)
        apart = all(
            0 <= a < b and program.stages[a].devices == program.stages[b].devices
            for a, b in zip(sources, targets, strict=True)
        )
        if whole and apart and len({*sources, *targets}) == 2 * len(sources) and max(sources) < min(targets):
            ends = zip(one.results, sources, targets, one.parts, strict=True)
            moves = tuple(Move(result, source, target, part=part) for result, source, target, part in ends)
            dropped.update(*one.made, *one.cuts)
            found.append(Collective(one.kind, moves, one.dim))
    if not found:
        return program
    ops = [tuple(op for op in stage.ops if op.name not in dropped) for stage in program.stages]
    made = tuple(move for one in found for move in one.moves)
    parts = {*dropped, *(move.given for move in made)}
    return replace(wire(program, ops, [*_needed(program, ops, made, parts), *made]), collectives=tuple(found))


def _needed(program: Program, ops: Sequence[Sequence[Op]], made: Sequence[Move], parts: Collection[str]) -> list[Move]:
    """The moves but for those of parts that a stage neither reads nor gives to another one any more."""
    reads = [{name for op in stage for name in op.reads} for stage in ops]
    given = {(move.given, move.source) for move in made}
    kept = []
    for move in sorted(program.moves, key=lambda move: move.target, reverse=True):
        needed = move.value not in parts or move.value in reads[move.target] or (move.value, move.target) in given
        if needed or move.target == len(ops):
            kept.append(move)
            given.add((move.value, move.source))
    return kept
