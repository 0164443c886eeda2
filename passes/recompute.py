"""Marks the stages that recompute in backward what they computed in forward, as the plan says.

A stage whose ops need no gradient has nothing to recompute, whatever the plan says. One that calls a submodule whole
which sets attributes of its own, or draws random numbers of Python's or numpy's, would compute another thing, so it
keeps what it computed first.
"""

from __future__ import annotations

from dataclasses import replace

from fxpipe.errors import PlanError
from fxpipe.ir.opaque import Opaque
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program, Stage
from fxpipe.ir.types import tensors


def recompute(program: Program, plan: Plan) -> Program:
    """The program with the plan's checkpoint modes. Raises PlanError for a stage that cannot be run twice."""
    parameters = {state.name for state in program.graph.states if state.kind == "parameter"}

    def marked(stage: Stage) -> Stage:
        mode = plan.stages[stage.index].checkpoint
        if mode == "never" or not any(t.grad for op in stage.ops for t in tensors(op.type)):
            return stage
        if any(isinstance(op.target, Opaque) and op.target.remembers for op in stage.ops):
            return stage
        _refuse_changed(stage, parameters)
        return replace(stage, checkpoint=mode)

    stages = tuple(map(marked, program.stages))
    return program if stages == program.stages else replace(program, stages=stages)


def _refuse_changed(stage: Stage, parameters: set[str]) -> None:
    for op in stage.ops:
        for name in parameters.intersection(op.writes):
            raise PlanError(
                f"stage {stage.index} cannot be recomputed: op {op.name}, at {op.origin}, changes the parameter "
                f"{name} in forward; plan this stage with checkpoint 'never'"
            )
