"""Computes cheap values where they are used instead of sending them: masks, position ids, zeros, numbers from sizes.

A value is cheap if it depends only on sizes, literals and other cheap values. Every stage that uses a cheap value gets
its own copy of the ops that make it; all copies but the first have new names. Values that are random, written in place
or need a gradient are computed once and sent, as before.

    stage 0   ids = arange(t)  ...  gives ids          stage 0   ...
    stage 1   takes ids                                stage 1   ids = arange(t)
    stage 2   takes ids                                stage 2   ids_1 = arange(t)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from fxpipe.ir.graph.graph import Op, rename
from fxpipe.ir.graph.shared_memory_values import known, memory
from fxpipe.ir.graph.value_types import tensors
from fxpipe.ir.program.program import Program, Stage
from fxpipe.passes.connect_stages import fresh, wire
from fxpipe.passes.pass_context import PassContext


def recompute_cheap(program: Program, context: PassContext) -> Program:
    """The program with cheap values computed in every stage that uses them."""
    ops = [op for stage in program.stages for op in stage.ops]
    cheap = _cheap(program, ops)
    n = len(program.stages)
    moves = [move for move in program.moves if move.value not in cheap or move.target == n]
    if len(moves) == len(program.moves):
        return program
    unread = cheap.keys() - {name for op in ops for name in op.reads}  # checks of sizes, say: they stay
    types, seen = dict(program.types), set[str]()
    names, stages = set(types), []
    for stage in program.stages:
        here = {op.name for op in stage.ops}
        given = {move.value for move in moves if move.source == stage.index}
        needed = _behind(cheap, [*_read(stage, cheap), *(given & cheap.keys()), *(unread & here)])
        copies = {name: fresh(name, names) if name in seen else name for name in needed}
        seen |= needed
        types |= {copy: types[name] for name, copy in copies.items()}
        far = [op for op in cheap.values() if op.name in needed - here]
        near = [op for op in stage.ops if op.name not in cheap or op.name in needed]
        stages.append(tuple(rename(op, copies) for op in (*far, *near)))
    return replace(wire(program, stages, moves), types=types)


def _cheap(program: Program, ops: Iterable[Op]) -> dict[str, Op]:
    """The ops with cheap results, by name, in the order they run."""
    root = memory(ops, program.types)
    written = {root(name) for op in ops for name in op.writes}
    sizes = {size.name for size in program.graph.sizes}
    cheap: dict[str, Op] = {}
    for op in ops:
        plain = known(op.target) and not op.random and not op.writes and root(op.name) not in written
        if plain and not any(t.grad for t in tensors(op.type)) and all(r in cheap or r in sizes for r in op.reads):
            cheap[op.name] = op
    return cheap


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
