"""Lets batch norm keep running statistics of whole mini-batches instead of micro-batches, if the plan says so.

Each micro-batch is still normalised by its own mean and variance; its sums are added up, and the running mean, the
running variance and the counter change once, at the end of the mini-batch. So the op that counts is removed too.

    count = num_batches_tracked.add_(1)
    y = batch_norm(x, mean, var, w, b, True, 0.1, 1e-5)    y = deferred_batch_norm(x, mean, var, count, w, b, 0.1, 1e-5)

Instance norm with running statistics is handled in the same way. A submodule that is kept whole calls its norms itself:
its call is marked, and the runtime defers the norms while the submodule runs. Ops that change running statistics or a
counter in another way are refused, as their result for the whole mini-batch is not defined.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.errors import PlanError
from fxpipe.ir.graph.graph import Op, Ref, refs
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.operators.batch_norm_ops import training_batch_norm, training_instance_norm
from fxpipe.ir.program.program import Program, RuntimeCall, Stage
from fxpipe.passes.connect_stages import changed_program
from fxpipe.passes.pass_context import PassContext

DEFERRED_BATCH_NORM = RuntimeCall("deferred_batch_norm")
DEFERRED_INSTANCE_NORM = RuntimeCall("deferred_instance_norm")
STATISTICS = ("running_mean", "running_var")
COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class Norm:
    """A norm in training: its arguments by name, and the counter that it increments, or None."""

    target: RuntimeCall
    arguments: Mapping[str, Any]
    counter: str | None


@dataclass(frozen=True)
class Count:
    """Ops that add one to a counter, and do nothing else."""

    counter: str
    ops: tuple[str, ...]


def defer_batch_norm(program: Program, context: PassContext) -> Program:
    """The program with deferred norms, if the plan wants them. Raises PlanError where one cannot be deferred."""
    if not context.plan.deferred_batch_norm:
        return program
    ops = [op for stage in program.stages for op in stage.ops]
    paths = {state.name: state.path for state in program.graph.states}
    counts = [count for stage in program.stages for count in _counts(stage, paths)]
    norms = _norms(ops, paths, counts)
    counters = {name: norm.counter for name, norm in norms.items() if norm.counter is not None}
    dropped = {name for count in counts if count.counter in counters.values() for name in count.ops}
    _refuse_others([op for op in ops if op.name not in {*norms, *dropped}], paths, set(counters.values()))
    calls = _calls(ops, norms)
    if not calls:
        return program

    def deferred(op: Op) -> Op:
        if op.name in norms:
            return _defer(op, norms[op.name], calls[op.name])
        if op.name in calls:
            return replace(op, target=replace(op.target, deferred=calls[op.name]))  # type: ignore[type-var]
        return op

    stages = (
        replace(stage, ops=tuple(deferred(op) for op in stage.ops if op.name not in dropped))
        for stage in program.stages
    )
    return _with_counters(changed_program(program, stages), counters)


def _counts(stage: Stage, paths: Mapping[str, str]) -> Iterator[Count]:
    """The ops that add one to a batch norm's counter and whose results no op reads."""
    made = {op.name: op for op in stage.ops}
    readers = Counter(stage.gives)
    readers.update(name for op in stage.ops for name in {ref.name for ref in refs((op.args, op.kwargs))})
    for op in stage.ops:
        counter = op.writes[0] if len(op.writes) == 1 else ""
        if paths.get(counter, "").rpartition(".")[2] != COUNTER or readers[op.name]:
            continue
        if op.target in ("add_", operator.iadd) and op.args == (Ref(counter), 1):
            yield Count(counter, (op.name,))
        elif op.target == "copy_" and isinstance(op.args[1], Ref):  # count = count + 1
            added = made.get(op.args[1].name)
            one_more = added is not None and added.target in (operator.add, torch.add, "add")
            if added is not None and one_more and added.args == (Ref(counter), 1) and readers[added.name] == 1:
                yield Count(counter, (added.name, op.name))


def _norms(ops: Iterable[Op], paths: Mapping[str, str], counts: Iterable[Count]) -> dict[str, Norm]:
    """The norms, by the names of their ops. Each norm uses up one of its counter's counts, as long as there are any."""
    left, counters, found = Counter(count.counter for count in counts), {path: name for name, path in paths.items()}, {}
    for op in ops:
        if (arguments := training_batch_norm(op)) is not None:
            prefix, _, leaf = paths[arguments["running_mean"].name].rpartition("running_mean")
            counter = None if leaf else counters.get(prefix + COUNTER)
            if counter is not None:
                left[counter] -= 1
                counter = counter if left[counter] >= 0 else None
            found[op.name] = Norm(DEFERRED_BATCH_NORM, arguments, counter)
        elif (arguments := training_instance_norm(op)) is not None:
            found[op.name] = Norm(DEFERRED_INSTANCE_NORM, arguments, None)
    return found


def _calls(ops: Iterable[Op], norms: Collection[str]) -> dict[str, int]:
    """For each op that updates running statistics, or calls a submodule whole that may do so: how many earlier ops
    update the same ones."""
    seen: dict[str, int] = {}
    found = {}
    for op in ops:
        if op.name in norms or (isinstance(op.target, Opaque) and op.writes):
            found[op.name] = call = max(seen.get(name, 0) for name in op.writes)
            seen |= dict.fromkeys(op.writes, call + 1)
    return found


def _refuse_others(ops: Iterable[Op], paths: Mapping[str, str], counters: Collection[str]) -> None:
    """Raise PlanError for an op that changes running statistics, or uses a counter, in a way that is not deferred."""
    for op in ops:
        if isinstance(op.target, Opaque):
            _refuse_compiled(op.target)
            continue
        for name in op.writes:
            if paths.get(name, "").rpartition(".")[2] in (*STATISTICS, COUNTER):
                raise PlanError(
                    f"op {op.name}, at {op.origin}, changes {paths[name]} itself, once for each micro-batch, "
                    "which cannot be deferred to the end of the batch; leave that to F.batch_norm, or compile without "
                    "deferred_batch_norm"
                )
        for name in op.reads:
            if name in counters:
                raise PlanError(
                    f"op {op.name}, at {op.origin}, reads the counter {name} of a deferred batch norm, which counts "
                    "at the end of the batch; compile without deferred_batch_norm"
                )


def _refuse_compiled(opaque: Opaque) -> None:
    """Raise PlanError if compiled code in a submodule that is kept whole updates running statistics."""
    for path, part in opaque.module.named_modules(prefix=opaque.path):
        compiled = isinstance(part, torch.jit.ScriptModule) and getattr(part, "training", False)
        if compiled and not set(STATISTICS).isdisjoint(part._buffers.keys()):
            raise PlanError(
                f"{path or 'the model'} is made by torch.jit.script or torch.jit.trace, and updates its running "
                "statistics in compiled code, which cannot be deferred to the end of the batch; compile without "
                "deferred_batch_norm"
            )


def _defer(op: Op, norm: Norm, call: int) -> Op:
    given = norm.arguments
    if isinstance(given["momentum"], Ref) or given["momentum"] is None:
        raise PlanError(
            f"{op.name}, at {op.origin}, cannot be deferred: its momentum is computed in the graph; give it a number, "
            "or compile without deferred_batch_norm"
        )
    tensors: tuple[Any, ...] = (given["input"], given["running_mean"], given["running_var"])
    if norm.target is DEFERRED_BATCH_NORM:
        tensors = (*tensors, Ref(norm.counter) if norm.counter else None)
    written = tuple(ref.name for ref in tensors[1:] if ref is not None)
    args = (*tensors, *(given[key] for key in ("weight", "bias", "momentum", "eps")))
    return replace(op, target=norm.target, args=args, kwargs={"call": call} if call else {}, writes=written)


def _with_counters(program: Program, counters: Mapping[str, str]) -> Program:
    """The program with each counter in the stage of its batch norm: a cut may have separated them."""
    homes = {counters[op.name]: stage.index for stage in program.stages for op in stage.ops if op.name in counters}

    def owning(stage: Stage) -> Stage:
        gone = {name for name, home in homes.items() if home != stage.index}
        here = [name for name, home in homes.items() if home == stage.index and name not in stage.states]
        return replace(
            stage,
            states=(*(name for name in stage.states if name not in gone), *here),
            mutates=(*(name for name in stage.mutates if name not in gone), *here),
            rereads=tuple(name for name in stage.rereads if name not in gone),
        )

    return changed_program(program, map(owning, program.stages))
