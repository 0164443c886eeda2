"""The order in which a schedule runs the forwards of a stage that writes buffers or parameters.

The final value of a running mean, for example, depends on the order of the calls. fxpipe's schedules run the forwards
of a stage in the order of the micro-batches; a user's own schedule may not.
"""

from __future__ import annotations

from itertools import pairwise

from fxpipe.errors import PlanError
from fxpipe.ir.graph.graph import Op
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.program.program import Program, RuntimeCall, Stage
from fxpipe.ir.schedule.schedule import Schedule


def check_write_order(schedule: Schedule, program: Program) -> None:
    """Raise PlanError if a stage that writes buffers or parameters in forward runs its micro-batches out of order, so
    that their final values would differ from the model's. Deferred norms may run in any order: they only add up."""
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
    """An op of the stage that writes a buffer or parameter directly, with its path, or None. `num_batches_tracked` is
    given only if nothing else is written."""
    paths = {state.name: state.path for state in program.graph.states}
    found = [(op, paths[name]) for op in stage.ops if not _is_deferred(op) for name in op.writes if name in paths]
    kept = [(op, op.target) for op in stage.ops if isinstance(op.target, Opaque) and not _is_deferred(op)]
    found += [(op, min(opaque.remembers)) for op, opaque in kept if opaque.remembers]
    return min(found, key=lambda written: written[1].endswith("num_batches_tracked"), default=None)


def _is_deferred(op: Op) -> bool:
    if isinstance(op.target, Opaque):
        return op.target.deferred is not None
    return isinstance(op.target, RuntimeCall) and op.target.name.startswith("deferred_")
