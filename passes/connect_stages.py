"""The last part of each pass that changes moves: it makes the stages' takes and gives agree with the moves.

Takes, gives and moves are ordered by their values: inputs first, then the results of ops in the order they run, then
tensors of the model, then sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fxpipe.ir.graph.graph import Graph, Op
from fxpipe.ir.graph.value_types import ValueType
from fxpipe.ir.program.program import Move, Program, Stage


def wire(program: Program, ops: Sequence[tuple[Op, ...]], moves: Iterable[Move]) -> Program:
    """The program with these ops (one tuple per stage) and moves; the same object if nothing changes."""
    order = producer_order(program.graph)
    moves = tuple(sorted(moves, key=lambda move: (order[move.value], move.source, move.target)))
    sizes = {size.name for size in program.graph.sizes}
    takes = [{name for op in stage for name in op.reads if name in sizes} for stage in ops] + [set()]
    gives: list[set[str]] = [set() for _ in program.stages]
    for move in moves:
        takes[move.target].add(move.value)
        if move.source >= 0:
            gives[move.source].add(move.given)

    def changed(stage: Stage) -> Stage:
        takes_, gives_ = (tuple(sorted(names[stage.index], key=order.__getitem__)) for names in (takes, gives))
        return replace(stage, ops=ops[stage.index], takes=takes_, gives=gives_)

    return changed_program(program, map(changed, program.stages), moves)


def changed_program(
    program: Program,
    stages: Iterable[Stage],
    moves: tuple[Move, ...] | None = None,
    types: Mapping[str, ValueType] | None = None,
) -> Program:
    """The program with these stages and moves, and with `types` added; the same object if stages and moves are
    equal."""
    stages, moves = tuple(stages), program.moves if moves is None else moves
    if stages == program.stages and moves == program.moves:
        return program
    return replace(program, stages=stages, moves=moves, types={**program.types, **(types or {})})


def producer_order(graph: Graph) -> dict[str, int]:
    """The rank of each value in the order of takes, gives and moves."""
    names = [item.name for item in graph.inputs] + [op.name for op in graph.ops]
    names += [state.name for state in graph.states] + [size.name for size in graph.sizes]
    return {name: rank for rank, name in enumerate(names)}


def fresh(name: str, taken: set[str]) -> str:
    """The first of `name_1`, `name_2`, ... that is not in `taken`, or if there are gaps, one of these; adds it to
    `taken`."""
    below, number = 0, 1
    while f"{name}_{number}" in taken:  # thousands of stages may copy one value
        below, number = number, 2 * number
    while number - below > 1:
        middle = (below + number) // 2
        below, number = (middle, number) if f"{name}_{middle}" in taken else (below, middle)
    taken.add(f"{name}_{number}")
    return f"{name}_{number}"
