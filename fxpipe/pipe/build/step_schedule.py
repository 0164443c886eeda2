"""The schedule of a step or a call, and what the model demands of it.

- An epilogue needs what the last stage gives for all micro-batches before it gives gradients: all forwards of that
  stage come before its first backward, as in GPipe.
- The final value of a buffer that forward writes, such as a running mean, depends on the order of the forwards: that of
  the micro-batches, which a user's own schedule may not keep.
"""

from __future__ import annotations

from itertools import pairwise

from fxpipe.errors import PlanError, warn
from fxpipe.ir.graph.graph import Graph, Op
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.program.program import Program, RuntimeCall, Stage
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.schedule.sub_schedule import share
from fxpipe.pipe.options.compile_options import Options, make_schedule
from fxpipe.schedules.make_schedule import make
from fxpipe.schedules.one_f_one_b import gpipe


def schedule_of(program: Program, chunks: int, options: Options, limit: int) -> Schedule:
    """The schedule of a step; calls of the pipe run GPipe's, over ranks only its forwards. `limit` is how many
    micro-batches fit into memory."""
    if program.graph.loss is None and options.ranks:
        return make("forward-only", program.devices, chunks)
    if program.graph.loss is not None:
        made = make_schedule(options, program.devices, chunks, limit)
        if not program.graph.trains_epilogue or _forwards_first(made, program.epilogue_stage):
            return made
        warn(
            f"not used: the order of schedule {made.name!r}, as the loss needs the whole batch: all forwards of the "
            "last stage come before its first backward, as with schedule='gpipe'"
        )
    return share(gpipe(len(program.stages), chunks), program.devices)


def refuse_epilogue(graph: Graph, why: str) -> None:
    """Raise PlanError for a graph with an epilogue. `why`: the end of the sentence."""
    if graph.epilogue is not None:
        raise PlanError(f"{graph.epilogue.ops[-1].origin}\nneeds the whole batch, {why}")


def _forwards_first(schedule: Schedule, stage: int) -> bool:
    """Whether all forwards of a stage come before its first backward."""
    kinds = "".join(action.kind for row in schedule.devices for action in row if action.stage == stage)
    return "F" not in kinds.lstrip("F")


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
