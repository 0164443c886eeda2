"""Schedules that run the forwards of a stage out of order, where forward writes buffers or parameters.

What a model leaves in a running mean depends on the order of its calls. Our own schedules run the forwards of a stage
in the order of the micro-batches; one that the user wrote may not.
"""

from __future__ import annotations

from itertools import pairwise

from fxpipe.errors import PlanError
from fxpipe.ir.graph.graph import Op
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.program.program import Program, RuntimeCall, Stage
from fxpipe.ir.schedule.schedule import Schedule


def check_write_order(schedule: Schedule, program: Program) -> None:
    """Raise PlanError if a stage that writes buffers or parameters in forward runs the micro-batches in another order
    than the model does, so that it would leave other values in them. Deferred norms are free: they add up."""
    for stage in program.stages:
        written = _writing_op(program, stage)
        order = [] if written is None else [a.micro_batch for row in schedule.devices for a in row
                                            if (a.kind, a.stage) == ("F", stage.index)]  # fmt: skip
        late = next(((i, j) for i, j in pairwise(order) if i > j), None)
        if late is not None and written is not None:
            op, path = written
            raise PlanError(
                f"{op.origin}\nforward writes {path} here, and the schedule {schedule.name!r} runs F{late[0]} of stage "
                f"{stage.index} before F{late[1]}: the model would leave other values in it; order the "
                "forwards of this stage by micro-batch"
            )


def _writing_op(program: Program, stage: Stage) -> tuple[Op, str] | None:
    """An op that writes a buffer or parameter at once, and its path; a counter of batches only if there is no other."""
    paths = {state.name: state.path for state in program.graph.states}
    found = [(op, paths[name]) for op in stage.ops if not _is_deferred(op) for name in op.writes if name in paths]
    kept = [(op, op.target) for op in stage.ops if isinstance(op.target, Opaque) and not _is_deferred(op)]
    found += [(op, min(opaque.remembers)) for op, opaque in kept if opaque.remembers]
    return min(found, key=lambda written: written[1].endswith("num_batches_tracked"), default=None)


def _is_deferred(op: Op) -> bool:
    if isinstance(op.target, Opaque):
        return op.target.deferred is not None
    return isinstance(op.target, RuntimeCall) and op.target.name.startswith("deferred_")
