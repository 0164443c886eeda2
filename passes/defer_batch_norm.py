"""Lets batch norm keep running statistics of whole mini-batches instead of micro-batches, if the plan says so.

Each micro-batch is still normalised by its own mean and variance; its sums are added up, and the running mean, the
running variance and the counter change once, at the end of the mini-batch. So the op that counts goes too.

    count = num_batches_tracked.add_(1)
    y = batch_norm(x, mean, var, w, b, True, 0.1, 1e-5)    y = deferred_batch_norm(x, mean, var, count, w, b, 0.1, 1e-5)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fxpipe.errors import PlanError
from fxpipe.ir.graph import Op, Ref
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program, RuntimeCall, Stage
from fxpipe.passes.batch_norm import training_batch_norm
from fxpipe.passes.wiring import changed_program

DEFERRED_BATCH_NORM = RuntimeCall("deferred_batch_norm")


def defer_batch_norm(program: Program, plan: Plan) -> Program:
    """The program with deferred batch norms, if the plan wants them."""
    if not plan.deferred_batch_norm:
        return program
    paths = {state.path: state.name for state in program.graph.states}
    keys = {state.name: state.path for state in program.graph.states}

    def counter(mean: Ref) -> str | None:
        prefix, _, leaf = keys[mean.name].rpartition("running_mean")
        return None if leaf else paths.get(prefix + "num_batches_tracked")

    norms = {op.name: norm for stage in program.stages for op in stage.ops if (norm := training_batch_norm(op))}
    counters = {name: counter(norm["running_mean"]) for name, norm in norms.items()}

    def deferred(stage: Stage) -> Stage:
        counts = set(_counts(stage, {name for name in counters.values() if name}))
        ops = (_defer(op, norms[op.name], counters[op.name]) if op.name in norms else op for op in stage.ops)
        return replace(stage, ops=tuple(op for op in ops if op.name not in counts))

    return _with_counters(changed_program(program, map(deferred, program.stages)), counters)


def _with_counters(program: Program, counters: Mapping[str, str | None]) -> Program:
    """The program in which each counter belongs to the stage of its batch norm; a cut may have come between them."""
    homes = {counters[op.name]: stage.index for stage in program.stages for op in stage.ops if op.name in counters}

    def owning(stage: Stage) -> Stage:
        _refuse_readers(stage, homes)
        gone = {name for name, home in homes.items() if home != stage.index}
        here = [name for name, home in homes.items() if name and home == stage.index and name not in stage.states]
        return replace(
            stage,
            states=(*(name for name in stage.states if name not in gone), *here),
            mutates=(*(name for name in stage.mutates if name not in gone), *here),
            rereads=tuple(name for name in stage.rereads if name not in gone),
        )

    return changed_program(program, map(owning, program.stages))


def _refuse_readers(stage: Stage, homes: Mapping[str | None, int]) -> None:
    for op in stage.ops:
        for name in op.reads:
            if homes.get(name, stage.index) != stage.index:
                raise PlanError(
                    f"op {op.name}, at {op.origin}, reads the counter {name} of a deferred batch norm, which is in "
                    f"stage {homes[name]}; keep both in one stage, or compile without deferred_batch_norm"
                )


def _defer(op: Op, norm: Mapping[str, Any], counter: str | None) -> Op:
    if isinstance(norm["momentum"], Ref) or norm["momentum"] is None:
        raise PlanError(
            f"batch norm {op.name}, at {op.origin}, cannot be deferred: its momentum is not a number but depends on "
            f"how many batches there were (momentum=None); give it a momentum, or compile without deferred_batch_norm"
        )
    keys = ("weight", "bias", "momentum", "eps")
    tensors = (norm["input"], norm["running_mean"], norm["running_var"], Ref(counter) if counter else None)
    written = tuple(ref.name for ref in tensors[1:] if ref is not None)
    args = (*tensors, *(norm[key] for key in keys))
    return replace(op, target=DEFERRED_BATCH_NORM, args=args, kwargs={}, writes=written)


def _counts(stage: Stage, counters: set[str]) -> Iterator[str]:
    """The ops that add one to a batch norm's counter, and whose result nobody reads."""
    read = {name for op in stage.ops for name in op.reads} | set(stage.gives)
    for op in stage.ops:
        if counters.intersection(op.writes) and op.reads == op.writes and op.name not in read:
            yield op.name
