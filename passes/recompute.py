"""Marks the stages that recompute in backward what they computed in forward, as the plan says.

Three kinds of stages recompute nothing, whatever the plan says:

- stages whose ops need no gradient;
- stages that give no value with a gradient: no backward reaches them;
- stages that call a submodule whole which sets its own attributes, or draws random numbers of Python or numpy: a second
  run would have other results.

What is cheap alone ("selective") is recomputed in backward as code only, which steps have; a call recomputes all of
forward, except for the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.value_types import tensors
from fxpipe.ir.program.program import Program, Stage
from fxpipe.passes.pass_context import PassContext


def recompute(program: Program, context: PassContext) -> Program:
    """The program with the plan's checkpoint modes."""

    def marked(stage: Stage) -> Stage:
        mode = context.plan.stages[stage.index].checkpoint
        if mode == "never" or not any(t.grad for op in stage.ops for t in tensors(op.type)):
            return stage
        if not any(t.grad for name in stage.gives for t in tensors(program.types[name])):
            return stage
        if any(isinstance(op.target, Opaque) and op.target.remembers for op in stage.ops):
            return stage
        if mode == "selective" and program.graph.loss is None:
            mode = "except_last"
        return replace(stage, checkpoint=mode)

    stages = tuple(map(marked, program.stages))
    return program if stages == program.stages else replace(program, stages=stages)


def recomputing(program: Program, modes: Sequence[str]) -> Program:
    """The program with another mode for each stage that `recompute` has marked."""
    stages = (
        replace(stage, checkpoint=mode) if stage.checkpoint != "never" else stage
        for stage, mode in zip(program.stages, modes, strict=True)
    )
    return replace(program, stages=tuple(stages))
