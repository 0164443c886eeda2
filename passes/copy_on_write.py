"""Makes in-place writes safe across stages.

A stage never writes memory that comes from outside. If it takes a value and changes it, or a view of it, it changes a
copy. So these stay unchanged: tensors that a neighbour keeps for backward, values that other stages take, arguments
that a recomputation starts from, and the caller's batch. Likewise a stage never gives, or keeps for backward, a buffer
that the next micro-batch changes, or a view of one.

    takes x                            takes x
                                       x_1 = clone(x)
    y = add_(x, 1)                     y = add_(x_1, 1)

`mutates` lists the buffers that a stage changes; `rereads` lists those of them whose old contents its results depend
on, which a recomputation needs again. A running mean is not in `rereads`, nor is a counter that nothing else reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fxpipe.ir.graph.graph import Op, Ref, called, refs, rename
from fxpipe.ir.graph.ops import MERE_VIEWS
from fxpipe.ir.graph.shared_memory_values import memory
from fxpipe.ir.graph.value_types import TensorType, ValueType, tensors
from fxpipe.ir.operators.batch_norm_ops import training_batch_norm
from fxpipe.ir.program.program import Program, Stage
from fxpipe.passes.connect_stages import changed_program, fresh
from fxpipe.passes.pass_context import PassContext


def copy_on_write(program: Program, context: PassContext) -> Program:
    """The program with copies before writes to memory that is not the stage's own, and with `mutates` and `rereads`."""
    types, names = dict(program.types), set(program.types)
    states = {state.name for state in program.graph.states}

    def made_safe(stage: Stage) -> Stage:
        mutated = {name for op in stage.ops for name in op.writes if name in states}
        for copy in (_copy_taken, _copy_kept, _copy_given):
            stage = copy(stage, mutated, types, names)
        rereads = _needed(stage, memory(stage.ops, types)) & mutated if mutated else mutated
        order = (*stage.states, *stage.borrows)
        return replace(
            stage,
            mutates=tuple(name for name in order if name in mutated),
            rereads=tuple(name for name in order if name in rereads),
        )

    return changed_program(program, [made_safe(stage) for stage in program.stages], types=types)


def _copy_taken(stage: Stage, mutated: set[str], types: dict[str, ValueType], names: set[str]) -> Stage:
    """Copies at the start of the stage for the values it takes and writes."""
    if not any(op.writes for op in stage.ops):
        return stage
    root = memory(stage.ops, types)
    writers = {root(name): op for op in reversed(stage.ops) for name in op.writes}
    copies = {}
    for name in stage.takes:
        if root(name) in writers and isinstance(types[name], TensorType):
            copies[name] = fresh(name, names)
    clones = [_clone(copy, name, writers[root(name)], types) for name, copy in copies.items()]
    return replace(stage, ops=(*clones, *(rename(op, copies) for op in stage.ops))) if copies else stage


def _copy_kept(stage: Stage, mutated: set[str], types: dict[str, ValueType], names: set[str]) -> Stage:
    """Copies of buffers before the ops that may keep them for backward, as a later micro-batch changes the buffers.
    Views need none: they keep nothing, and must see later writes."""
    if not mutated:
        return stage
    root = memory(stage.ops, types)
    buffers = {root(name) for name in mutated}
    copies: dict[str, str] = {}  # copies that still equal their buffer
    ops: list[Op] = []
    for op in stage.ops:
        written = {root(name) for name in op.writes}
        keeps = called(op) not in MERE_VIEWS and any(tensor.grad for tensor in tensors(op.type))
        if keeps and not written & buffers:
            for name in op.reads:
                if root(name) in buffers and isinstance(types[name], TensorType) and name not in copies:
                    copies[name] = fresh(name, names)
                    ops.append(_clone(copies[name], name, op, types))
            op = rename(op, {name: copy for name, copy in copies.items() if name in op.reads})
        copies = {name: copy for name, copy in copies.items() if root(name) not in written}
        ops.append(op)
    return replace(stage, ops=tuple(ops)) if len(ops) > len(stage.ops) else stage


def _copy_given(stage: Stage, mutated: set[str], types: dict[str, ValueType], names: set[str]) -> Stage:
    """Copies at the end of the stage of the values it gives that may be views of a buffer it changes."""
    if not mutated:
        return stage
    root = memory(stage.ops, types)
    buffers = {root(name) for name in mutated}
    made = {op.name: op for op in stage.ops}
    views = [name for name in stage.gives if name in made and root(name) in buffers]
    views = [name for name in views if isinstance(types[name], TensorType)]
    if not views:
        return stage
    inner = {name: fresh(name, names) for name in views}
    types |= {inner[name]: types[name] for name in views}
    clones = [_clone(name, inner[name], made[name], types) for name in views]
    return replace(stage, ops=(*(rename(op, inner) for op in stage.ops), *clones))


def _clone(name: str, source: str, why: Op, types: dict[str, ValueType]) -> Op:
    types.setdefault(name, types[source])
    return Op(name, torch.clone, (Ref(source),), {}, types[source], why.origin)


def _needed(stage: Stage, root: Callable[[str], str]) -> set[str]:
    """The states whose contents at the beginning of the stage affect the values that it gives."""
    needed = {root(name) for name in stage.gives}
    for op in reversed(stage.ops):
        if root(op.name) in needed or any(root(name) in needed for name in op.writes):
            needed |= {root(name) for name in _inputs(op)}
    return {name for name in stage.states if root(name) in needed}


def _inputs(op: Op) -> tuple[str, ...]:
    """The names that the op's result depends on: all it reads, except a training batch norm's running statistics."""
    norm = training_batch_norm(op)
    if norm is None:
        return op.reads
    statistics = {"running_mean", "running_var"}
    return tuple(ref.name for key, value in norm.items() if key not in statistics for ref in refs(value))
