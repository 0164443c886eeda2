"""Detaches values at the end of their stage if no gradient comes back for them.

Backward runs through a stage as a whole: the gradients of all its results must arrive before the previous micro-batch
has its turn. Suppose that no gradient comes back for a value, as a later stage detaches it, or reads it under
`no_grad`. It would still lead autograd to the ops that made it, although the model's backward never reaches them, and
the tensors that they saved may have been overwritten.

    stage 0   h = linear(x, weight)    gives h        h_1 = linear(x, weight)    h = detach(h_1)    gives h
    stage 1   mean = h.detach().mean()                mean = h.detach().mean()

The stage also saves the memory that autograd would keep for that value. An input of this kind is detached before the
first stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fxpipe.ir.graph.graph import Op, Ref, rename
from fxpipe.ir.graph.shared_memory_values import memory
from fxpipe.ir.graph.value_types import ObjectType, TensorType, TupleType, ValueType
from fxpipe.ir.program.program import Collective, Program, Stage
from fxpipe.passes.connect_stages import fresh
from fxpipe.passes.pass_context import PassContext


def stop_gradients(program: Program, context: PassContext) -> Program:
    """The program in which a value that moves needs a gradient only if one comes back for it."""
    ops = [op for stage in program.stages for op in stage.ops]
    root = memory(ops, program.types)
    wanted = _wanted(program, ops, root)
    types, names = dict(program.types), set(program.types)

    def unasked(name: str) -> bool:
        return carries_gradient(types[name]) and root(name) not in wanted

    def stopped(stage: Stage) -> Stage:
        made = {op.name: op for op in stage.ops}
        inner = {name: fresh(name, names) for name in stage.gives if name in made and unasked(name)}
        detached = []
        for name, source in inner.items():
            types[source], types[name] = types[name], without_gradient(types[name])
            detached.append(Op(name, "detach", (Ref(source),), {}, types[name], made[name].origin))
        return replace(stage, ops=(*(rename(op, inner) for op in stage.ops), *detached)) if inner else stage

    stages = tuple(map(stopped, program.stages))
    inputs = {move.value for move in program.moves if move.source < 0}
    types |= {name: without_gradient(types[name]) for name in inputs if unasked(name)}
    made = {move.value for one in program.collectives for move in one.moves if not carries_gradient(types[move.given])}
    types |= {name: without_gradient(types[name]) for name in made}
    return program if types == program.types else replace(program, stages=stages, types=types)


def _wanted(program: Program, ops: Sequence[Op], root: Callable[[str], str]) -> set[str]:
    """The values, by their memory, that get a gradient if all outputs have one."""
    types, made = program.types, {op.name for op in ops}
    wanted = {root(output.value) for output in program.graph.outputs}
    giving: dict[int, list[tuple[str, Collective]]] = {}
    for one in program.collectives:
        for move in one.moves:
            giving.setdefault(move.source, []).append((move.given, one))
    for stage in reversed(program.stages):
        for name, one in giving.get(stage.index, ()):  # these make what later stages take
            if any(root(move.value) in wanted for move in one.moves):
                wanted.add(root(name))
        for op in reversed(stage.ops):
            results = (op.name, *op.writes)
            if any(root(name) in wanted for name in results) and any(carries_gradient(types[name]) for name in results):
                # The type of an input or a state does not tell what ops have written into it.
                wanted |= {root(name) for name in op.reads if name not in made or carries_gradient(types[name])}
    return wanted


def carries_gradient(type: ValueType) -> bool:
    """Whether a gradient may go through the value. True for all objects, as a tensor inside a vmap is one."""
    if isinstance(type, TupleType):
        return any(map(carries_gradient, type.items))
    return isinstance(type, ObjectType) or (isinstance(type, TensorType) and type.grad)


def without_gradient(type: ValueType) -> ValueType:
    return replace(type, grad=False) if isinstance(type, TensorType) else type
