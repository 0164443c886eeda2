"""Lends tensors of the model that several stages use (tied weights, tables), instead of sending them with every
micro-batch.

The first stage that uses the tensor is its home; the others borrow it. The tensor is sent once a step, and its gradient
is sent back once, summed over the micro-batches.
"""

from __future__ import annotations

from dataclasses import replace

from fxpipe.ir.program.program import Loan, Program
from fxpipe.passes.connect_stages import wire
from fxpipe.passes.pass_context import PassContext


def tie_weights(program: Program, context: PassContext) -> Program:
    """The program with a loan for each tensor of the model that moves from one stage to another."""
    n = len(program.stages)
    homes = {name: stage.index for stage in program.stages for name in stage.states}
    lent = [move for move in program.moves if move.value in homes and move.target < n]
    if not lent:
        return program
    loans = tuple(Loan(move.value, homes[move.value], move.target) for move in lent)
    gone = set(lent)
    moves = (move for move in program.moves if move not in gone)
    wired = wire(program, [stage.ops for stage in program.stages], moves)
    borrowing = replace(wired, loans=loans).borrowing
    stages = tuple(
        replace(stage, borrows=tuple(loan.state for loan in borrowing[stage.index])) for stage in wired.stages
    )
    return replace(wired, stages=stages, loans=(*program.loans, *loans))
