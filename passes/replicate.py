"""Gives stages their replicas, and determines how values are cut between stages with different numbers of replicas.

Between stages with equal numbers of replicas, replica k sends any value to replica k. Otherwise values are cut:

    stage 0 on cuda:0, cuda:1     x f32[b, 8]   is cut and joined along dimension 0
    stage 1 on cuda:2             scale f32[]   is the same for all samples: one replica sends it
                                  x.mean()      differs between slices, none is right for the micro-batch: refused
"""

from __future__ import annotations

from dataclasses import replace

from fxpipe.errors import PlanError
from fxpipe.ir.program.program import Move, Program, recut
from fxpipe.passes.pass_context import PassContext


def replicate(program: Program, context: PassContext) -> Program:
    """The program with the plan's replicas, if a step runs on them. Raises PlanError for a value that must be cut but
    cannot be."""
    samples, planned = context.samples, context.plan.stages
    if samples is None:
        return program
    stages = [replace(stage, replicas=own.replicas) for stage, own in zip(program.stages, planned, strict=True)]
    program = replace(program, stages=tuple(stages))

    def along(move: Move) -> Move:
        if not recut(move, program):
            return move
        if move.value not in samples:
            raise _refusal(program, move)
        return replace(move, dim=samples[move.value])

    return replace(program, moves=tuple(map(along, program.moves)))


def _refusal(program: Program, move: Move) -> PlanError:
    origin = next((op.origin for op in program.graph.ops if op.name == move.value), None)
    place = f", made at {origin}," if origin and origin.line else ""
    here, there = (f"on {', '.join(program.stages[s].devices)}" for s in (move.source, move.target))
    return PlanError(
        f"{move.value}, {program.types[move.value]}{place} goes from stage {move.source}, {here}, to stage "
        f"{move.target}, {there}, and cannot be cut between samples: it is made of all samples of a slice, or "
        "numbers them. Give both stages as many devices, or cut the model where something else crosses "
        "(cut=)"
    )
