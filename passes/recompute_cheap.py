"""Computes cheap values where they are used instead of sending them: masks, position ids, zeros, numbers from sizes.

`fxpipe/ir/graph/cheap_ops.py` says what is cheap. Every stage that uses a cheap value gets its own copy
of the ops that make it; all copies but the first have new names.

    stage 0   ids = arange(t)  ...  gives ids          stage 0   ...
    stage 1   takes ids                                stage 1   ids = arange(t)
    stage 2   takes ids                                stage 2   ids_1 = arange(t)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fxpipe.ir.graph.graph import Op, rename
from fxpipe.ir.program.cheap_ops import cheap_ops
from fxpipe.ir.program.program import Program, Stage
from fxpipe.passes.connect_stages import fresh, wire
from fxpipe.passes.pass_context import PassContext


def recompute_cheap(program: Program, context: PassContext) -> Program:
    """The program with cheap values computed in every stage that uses them."""
    ops = [op for stage in program.stages for op in stage.ops]
    names = cheap_ops(replace(program.graph, ops=tuple(ops)))
    cheap = {op.name: op for op in ops if op.name in names}
    n = len(program.stages)
    moves = [move for move in program.moves if move.value not in cheap or move.target == n]
    if len(moves) == len(program.moves):
        return program
    unread = cheap.keys() - {name for op in ops for name in op.reads}  # checks of sizes, say: they stay
    order = {name: at for at, name in enumerate(cheap)}
    given: dict[int, set[str]] = {}
    for move in moves:
        if move.value in cheap:
            given.setdefault(move.source, set()).add(move.value)
    types, seen = dict(program.types), set[str]()
    used, stages = set(types), []
    for stage in program.stages:
        here = {op.name for op in stage.ops}
        needed = _behind(cheap, [*_read(stage, cheap), *given.get(stage.index, ()), *(here & unread)])
        copies = {name: fresh(name, used) if name in seen else name for name in needed}
        seen |= needed
        types |= {copy: types[name] for name, copy in copies.items()}
        far = [cheap[name] for name in sorted(needed - here, key=order.__getitem__)]
        near = [op for op in stage.ops if op.name not in cheap or op.name in needed]
        stages.append(tuple(rename(op, copies) for op in (*far, *near)))
    return replace(wire(program, stages, moves), types=types)


def _read(stage: Stage, cheap: Mapping[str, Op]) -> Iterator[str]:
    """The cheap values that other ops of the stage read."""
    return (name for op in stage.ops if op.name not in cheap for name in op.reads if name in cheap)


def _behind(cheap: Mapping[str, Op], names: Iterable[str]) -> set[str]:
    """These cheap values, and all cheap values that they are computed from."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += (read for read in cheap[name].reads if read in cheap)
    return found
