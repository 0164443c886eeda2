"""Gives each stage its backward as ops, which generated code then shows and runs.

Stages are traced from the last to the first: whether a gradient arrives at a stage is known from those that take its
results. A stage that cannot be traced keeps autograd, and says why.

What forward keeps is made small and readable: an op of the stage stays as it is, `F.linear(x, weight)`, unless backward
needs something that it computes inside; views are made again in backward. In a stage with checkpoint "selective", so is
all that is cheap to compute, where that keeps less memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fxpipe.ir.graph.graph import Op, Origin, Ref, Region, op_name, rename
from fxpipe.ir.graph.ops import VIEWS
from fxpipe.ir.graph.value_types import NO_VALUE, Dim, TensorType, TupleType, ValueType
from fxpipe.ir.operators.batch_norm_ops import with_one_value
from fxpipe.ir.program.backward import Backward
from fxpipe.ir.program.program import Program, RuntimeCall, Stage
from fxpipe.passes.backward.ask_data_sizes import with_sizes_asked
from fxpipe.passes.backward.final_names import final_names
from fxpipe.passes.backward.readable_ops import (
    readable,
    simplified,
    with_plain_sums,
    with_reshapes,
    with_same_sizes,
    with_unknown_size,
    without_expands,
)
from fxpipe.passes.backward.refused import Refused
from fxpipe.passes.backward.selective import Recorded, computed_again, in_halves, is_cheap
from fxpipe.passes.backward.vmap_ops import Vmap, separate
from fxpipe.passes.pass_context import PassContext

if TYPE_CHECKING:
    from fxpipe.passes.backward.tracing.traces import Orders, Piece, Trace

CHECK = RuntimeCall("check_several_values")


def lower_backward(program: Program, context: PassContext) -> Program:
    """The program with the backward of each stage as ops, if code is to compute gradients."""
    if context.backward != "code" or program.graph.loss is None:
        return program
    from fxpipe.passes.backward.tracing.op_traces import KnownTraces  # late: torch's symbolic sizes take a second
    from fxpipe.passes.backward.tracing.trace_stage import layouts, trace

    known = KnownTraces(_autocasts(), context.traces)
    orders = layouts(program, known)
    made = list(program.stages)
    types = dict(program.types)
    for stage in reversed(program.stages):
        arriving = [name for name in stage.gives if _arrives(program, made, stage, name)]
        if not arriving:
            continue
        try:
            traced = trace(replace(program, types=types), stage, arriving, orders, known)
            lowered, more = _selective(program, stage, traced, types, context.sizes)
            made[stage.index] = _with_orders(lowered, orders)
            types |= more
        except Refused as refused:
            mode = "except_last" if stage.checkpoint == "selective" else stage.checkpoint
            made[stage.index] = replace(
                stage, autograd_because=str(refused), autograd_for_sizes=not refused.by_ops, checkpoint=mode
            )
    return replace(program, stages=tuple(made), types=types)


def _selective(
    program: Program, stage: Stage, traced: Trace, known: Mapping[str, ValueType], sizes: Mapping[str, int]
) -> tuple[Stage, dict[str, ValueType]]:
    """As `_lowered`. If what is to be kept cannot be written as code, all that backward needs is kept: "never"."""
    if stage.checkpoint != "selective":
        return _lowered(program, stage, traced, known)
    try:
        return _lowered(program, stage, traced, known, sizes)
    except Refused:
        return _lowered(program, replace(stage, checkpoint="never"), traced, known)


def _with_orders(stage: Stage, orders: Orders) -> Stage:
    """The stage, which knows the order of memory of what it takes."""
    found = tuple(orders.get(name, ()) for name in stage.takes)
    if stage.backward is None or not any(found):
        return stage
    return replace(stage, backward=replace(stage.backward, orders=found))


def _autocasts() -> tuple[Region, ...]:
    """Autocast as it is where the step is called."""
    return tuple(
        Region("autocast", (kind, torch.get_autocast_dtype(kind), True, None))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    )


def _arrives(program: Program, stages: Sequence[Stage], stage: Stage, name: str) -> bool:
    """Whether a gradient of the value comes back to the stage that gives it."""
    kind = program.types[name]
    if not isinstance(kind, TensorType) or not kind.grad:
        return False
    if name in program.graph.roots:
        return True
    users = [(stages[m.target], m.value) for m in program.moves if m.given == name and m.source == stage.index and
             m.target < len(stages)]  # fmt: skip
    return any(user.backward is None or dict(user.backward.takes).get(value) for user, value in users)


def _lowered(
    program: Program,
    stage: Stage,
    traced: Trace,
    known: Mapping[str, ValueType],
    sizes: Mapping[str, int] | None = None,
) -> tuple[Stage, dict[str, ValueType]]:
    """The stage with its backward, and the types of its new values. With `sizes`, a number for each symbolic size,
    what is cheap is computed again."""
    types = {**known, **traced.types}
    named = final_names(traced, known)
    pieces = [_renamed(piece, named) for piece in traced.pieces]
    cheap = {op.name for piece in pieces for op in piece.ops if is_cheap(op.target)}
    types |= {named.get(name, name): kind for name, kind in traced.types.items()}
    backward = with_reshapes([_written_well(rename(op, named), types) for op in traced.backward], types)
    backward = _simplified_pieces(pieces, backward, types)
    memory = {named.get(name, name): (named.get(owner, owner), size) for name, (owner, size) in traced.memory.items()}
    made = {op.name: op for piece in pieces for op in piece.ops}
    own = {op.name for op in stage.ops}
    inside = {name: op for name, op in made.items() if name not in own}
    settled = with_reshapes([*stage.ops, *inside.values()], types)
    forward = {op.name: op for op in settled if op.name in inside and _computes_nothing(op)}
    if sizes is not None:
        same = {name: value for name, value in _aliases(pieces).items() if value in types}  # else it is a constant
        backward = [rename(op, same) for op in backward]
        ops = with_reshapes([rename(op, same) for piece in pieces for op in piece.ops], types)
        recorded = Recorded(ops, cheap, memory, types, {name for op in backward for name in op.writes})
        needed = [name for op in backward for name in op.reads]
        forward = {op.name: op for op in computed_again(program, stage, recorded, needed, sizes)}
    backward, again, recomputed = _with_again(backward, forward, memory, types)
    memory |= {again[name]: (again.get(owner, owner), size) for name, (owner, size) in memory.items() if name in again}
    backward, same = simplified(backward, types)
    wished = {named[name] for name in traced.wishes if name in named}
    here = {op.name for op in backward}
    better: dict[str, str] = {}
    for old, new in same.items():
        if old in wished and new in here and new not in wished and new not in better:
            better[new] = old
    backward = [rename(op, better) for op in backward]

    plain = dict[str, str]()

    def final(name: str) -> str:
        for now in (named, same, better, plain):
            name = now.get(name, name)
        return name

    takes = tuple((name, final(gradient) if gradient else "") for name, gradient in traced.takes)
    weights = tuple((name, final(gradient)) for name, gradient in traced.weights)
    wanted = {gradient for _, gradient in (*takes, *weights) if gradient}
    backward, counts = without_expands(_alive(backward, wanted), types, wanted)
    backward, plain = with_plain_sums(backward, types, wanted)
    backward, weights = _with_own_memory(backward, takes, weights, types)
    ops = with_sizes_asked(_forward(stage, pieces, {x for op in backward for x in op.reads}, types), backward, types)
    made_here = {op.name for op in backward}
    roots = tuple((name, gradient) for name, gradient in traced.roots)
    begins = {gradient for _, gradient in roots}
    held = {*stage.states}
    order = (*stage.takes, *stage.borrows, *(op.name for op in ops))
    read = {name for op in backward for name in op.reads}
    read |= {gradient for _, gradient in (*takes, *weights) if gradient}
    keeps = tuple(name for name in dict.fromkeys(order) if name in read - made_here - begins - held)
    numbers = {size.name for size in program.graph.sizes}
    lost = read - made_here - begins - held - set(keeps) - numbers
    if lost:
        raise Refused(f"backward reads {', '.join(sorted(lost))}, which forward does not have")
    written = read & set(stage.mutates)
    if written:
        raise Refused(f"backward reads {', '.join(sorted(written))}, which forward writes")
    needs = {name for op in (*ops, *backward) for name in op.reads if name in numbers}
    stage_takes = (*stage.takes, *sorted(needs - set(stage.takes)))
    keeps = (*keeps, *sorted(read & numbers - set(keeps)))
    memory |= {name: (name, count) for name, count in counts.items()}
    memory = {final(name): (final(owner), size) for name, (owner, size) in memory.items()}
    scattered = frozenset(map(final, traced.scattered))
    code = Backward(
        keeps, roots, tuple(backward), takes, weights, memory, scattered=scattered,
        recomputed=frozenset(map(final, recomputed)) & made_here, repeats=_repeats(pieces, {*forward}),
    )  # fmt: skip
    if sizes is not None:
        code = in_halves(code, {final(name) for name in again.values()} & made_here, types, sizes)
    used = {op.name for op in (*ops, *backward)} | begins
    return (
        replace(stage, ops=tuple(ops), takes=stage_takes, backward=code),
        {name: types[name] for name in used if name and name not in known},
    )


def _simplified_pieces(pieces: Sequence[Piece], backward: Sequence[Op], types: Mapping[str, ValueType]) -> list[Op]:
    """Backward, after the recorded ops of forward have been simplified too."""
    now: dict[str, str] = {}
    for piece in pieces:
        ops = with_reshapes([_written_well(op, types) for op in piece.ops], types)
        piece.ops, same = simplified(ops, types, {piece.op.name, *piece.results.values()})
        now |= same
    return [rename(op, now) for op in backward]


def _renamed(piece: Piece, names: Mapping[str, str]) -> Piece:
    ops = [rename(op, names) for op in piece.ops]
    results = {place: names.get(name, name) for place, name in piece.results.items()}
    return replace(piece, ops=ops, results=results)


def _written_well(op: Op, types: Mapping[str, ValueType]) -> Op:
    made = readable(op)
    return with_same_sizes(with_unknown_size(made, made.type), types)


def _computes_nothing(op: Op) -> bool:
    """Whether the op is a view, or makes a tensor of numbers that are in the code."""
    if op.target is torch.tensor:
        return True
    return op_name(op) in VIEWS and op.target is not operator.getitem and not op.writes and not op.random


def _with_again(
    backward: Sequence[Op],
    forward: Mapping[str, Op],
    memory: Mapping[str, tuple[str, Dim]],
    types: dict[str, ValueType],
) -> tuple[list[Op], dict[str, str], set[str]]:
    """Backward, with those of these ops of `forward`, in its order, whose results it reads, just before they are read
    first; the new names of these results; and which of these ops compute something. Views after all of these have the
    line of what reads them."""
    order = {name: place for place, name in enumerate(forward)}
    parts: dict[str, list[str]] = {}
    for op in forward.values():
        if op.target is operator.getitem and isinstance(types[op.args[0].name], TupleType):
            parts.setdefault(op.args[0].name, []).append(op.name)
    found: list[Op] = []
    again: dict[str, str] = {}
    recomputed = set[str]()
    for op in backward:
        waiting, needed = [*op.reads], set[str]()
        while waiting:
            name = waiting.pop()
            if name in forward and name not in again and name not in needed:
                needed.add(name)
                waiting += [*forward[name].reads, *parts.get(name, ())]
        computed = (
            name for name in needed if memory.get(name, ("",))[0] == name and not _computes_nothing(forward[name])
        )
        last = max(map(order.__getitem__, computed), default=-1)
        for name in sorted(needed, key=order.__getitem__):
            again[name] = f"{name}_"
            while again[name] in types:
                again[name] += "_"
            types[again[name]] = types[name]
            if order[name] <= last:
                recomputed.add(again[name])
            origin = forward[name].origin if order[name] <= last else op.origin
            found.append(replace(forward[name], origin=origin, regions=(), draw=None))
        found.append(op)
    return [rename(op, again) for op in found], again, recomputed


def _aliases(pieces: Sequence[Piece]) -> dict[str, str]:
    """The names of results that are another value, such as that of a dropout in evaluation, with that value's name."""
    made = {op.name for piece in pieces for op in piece.ops}
    found: dict[str, str] = {}
    for piece in pieces:
        value = piece.results.get(None, piece.op.name)
        if value != piece.op.name and piece.op.name not in made:
            found[piece.op.name] = found.get(value, value)
    return found


def _repeats(pieces: Sequence[Piece], again: set[str]) -> dict[str, float]:
    """For each op of the stage the share of its work that backward does again; views and parts of tuples are none."""
    found = {}
    for piece in pieces:
        works = [op.name for op in piece.ops if not _computes_nothing(op) and op.target is not operator.getitem]
        if not again.isdisjoint(works):
            found[piece.op.name] = sum(name in again for name in works) / len(works)
    return found


def _alive(ops: Sequence[Op], wanted: Iterable[str]) -> list[Op]:
    """The ops that something needs. The parts of a tuple stay, if one is needed: it is unpacked at once."""
    needed = set(wanted)
    kept = []
    for op in reversed(ops):
        if op.name in needed or op.writes or op.random:
            kept.append(op)
            needed |= {*op.reads, *op.writes}
    return kept[::-1]


def _with_own_memory(
    ops: Sequence[Op],
    takes: Sequence[tuple[str, str]],
    weights: Sequence[tuple[str, str]],
    types: dict[str, ValueType],
) -> tuple[list[Op], tuple[tuple[str, str], ...]]:
    """Backward, with a copy of each weight's gradient that is another gradient too, or one that has arrived: those of
    later micro-batches are added to it in place."""
    made = {op.name: op for op in ops}
    taken = {gradient for _, gradient in takes}
    copies: list[Op] = []
    found: list[tuple[str, str]] = []
    for weight, gradient in weights:
        if gradient in taken or gradient not in made:
            name, origin = f"d{weight}", made[gradient].origin if gradient in made else Origin("", 0, "", "")
            while name in types:
                name += "_"
            types[name] = types[gradient]
            copies.append(Op(name, "clone", (Ref(gradient),), {}, types[name], origin))
            gradient = name
        taken.add(gradient)
        found.append((weight, gradient))
    return [*ops, *copies], tuple(found)


def _forward(stage: Stage, pieces: Sequence[Piece], read: set[str], types: dict[str, ValueType]) -> list[Op]:
    """The ops of forward: those of the stage, except that an op is replaced by what it runs where backward reads what
    is made inside."""
    found: list[Op] = []
    inside: set[str] = set()  # tuples that are not made any more
    users = {piece.op.name for piece in pieces}
    for piece in pieces:
        op, results = piece.op, set(piece.results.values())
        here = {part.name for part in piece.ops}
        if op.target is operator.getitem and isinstance(op.args[0], Ref) and op.args[0].name in inside:
            if not any(op.name == other.name for other in found):
                raise Refused(f"{op.name} is read twice, at {op.origin}")
            continue
        if not (read & here) - results - {op.name}:
            found += separate(op)
            if isinstance(op.target, Vmap):
                inside.add(op.name)
            for place, name in piece.results.items():
                if place is not None and name in read and name in here and name not in users:
                    found.append(Op(name, operator.getitem, (Ref(op.name), place), {}, types[name], op.origin))
            continue
        ops = piece.ops
        if None in piece.results and op.name not in here:
            raise Refused(f"{op.name} is what another value is, at {op.origin}")
        if None not in piece.results:
            inside.add(op.name)
        if (x := with_one_value(op, types)) is not None:
            check = f"{op.name}_checked"
            types[check] = NO_VALUE
            found.append(Op(check, CHECK, (x,), {}, NO_VALUE, op.origin))
        found += ops
    wanted = {*stage.gives, *read}
    return _alive_forward(stage, found, wanted)


def _alive_forward(stage: Stage, ops: Sequence[Op], wanted: set[str]) -> list[Op]:
    """The ops without recorded ones that nothing needs. Ops of the stage stay."""
    own = {op.name for op in stage.ops}
    kept, needed = [], set(wanted)
    for op in reversed(ops):
        if op.name in needed or op.name in own or op.writes or op.random or op.target is CHECK:
            kept.append(op)
            needed |= {*op.reads, *op.writes}
    return kept[::-1]
