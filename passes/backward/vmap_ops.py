"""The ops of a vmap as one op, for tracing: no tensor inside of a vmap exists outside of it.

    enter a vmap of seq
    row = add_batch_dim(position, 0, 1)       becomes       mask = Vmap(position, length)
    inside = row < length
    mask = remove_batch_dim(inside, 1, seq, 0)
    leave the vmap

What torch runs for it are ops of whole tensors, and autograd goes back through these.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fxpipe.ir.graph.graph import Op, Ref, called
from fxpipe.ir.graph.legal_cuts import vmaps
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.value_types import NO_VALUE, TupleType, ValueType, in_vmap
from fxpipe.ir.program.program import Program, RuntimeCall, Stage

PREPARE = "lazy_load_decompositions"  # what torch.vmap calls first


@dataclass(frozen=True)
class Vmap:
    """A function of what these `ops` read, with those that enter and leave a vmap. `gives`: the names of its results;
    it returns one alone, several as a tuple."""

    ops: tuple[Op, ...] = field(hash=False)  # their keyword arguments are in dicts
    gives: tuple[str, ...]
    __name__ = "vmap"

    def __call__(self, *args: Any) -> Any:
        raise TypeError("this is a mark for tracing, which runs the ops of the vmap")


def untraceable_vmaps(stage: Stage) -> str:
    """Why the vmaps of a stage cannot be traced; "" if they can."""
    for first, last in vmaps(stage.ops):
        for op in stage.ops[first : last + 1]:
            if op.draw is not None or isinstance(op.target, (Opaque, RuntimeCall)):
                return f"{called(op)} in a vmap, at {op.origin}"
    return ""


def with_vmaps(program: Program, stage: Stage) -> tuple[Program, Stage]:
    """The stage with each vmap as one op, which has the name of its result, and the program with the types of such ops.
    Several results are items of a tuple."""
    found, types, start = list[Op](), dict(program.types), 0
    for first, last in vmaps(stage.ops):
        first -= first > start and called(stage.ops[first - 1]) == PREPARE
        inside = stage.ops[first : last + 1]
        found += stage.ops[start:first]
        start = last + 1
        later = {name for op in stage.ops[start:] for name in (*op.reads, *op.writes)}
        merged = _merged(inside, later | {*stage.gives})
        types[merged[0].name] = merged[0].type
        found += merged
    return replace(program, types=types), replace(stage, ops=(*found, *stage.ops[start:]))


def _merged(ops: Sequence[Op], later: set[str]) -> list[Op]:
    """These ops as one, and one for each item of its result if there are several. `later`: what other ops read."""
    kinds: dict[str, ValueType] = {op.name: op.type for op in ops if op.name in later and not in_vmap(op.type)}
    own = {op.name for op in ops}
    reads = dict.fromkeys(name for op in ops for name in (*op.reads, *op.writes) if name not in own)
    writes = dict.fromkeys(name for op in ops for name in op.writes if name not in own)
    kind = next(iter(kinds.values())) if len(kinds) == 1 else TupleType((*kinds.values(),)) if kinds else NO_VALUE
    name = next(iter(kinds)) if len(kinds) == 1 else ops[0].name
    origin = next(op.origin for op in reversed(ops) if op.name in kinds or op is ops[0])
    whole = Op(name, Vmap((*ops,), (*kinds,)), (*map(Ref, reads),), {}, kind, origin, (), (*writes,))
    if len(kinds) <= 1:
        return [whole]
    items = enumerate(kinds.items())
    return [whole, *(Op(item, operator.getitem, (Ref(name), at), {}, of, origin) for at, (item, of) in items)]


def separate(op: Op) -> tuple[Op, ...]:
    """The ops that an op stands for, if it is a vmap; else itself."""
    if not isinstance(op.target, Vmap):
        return (op,)
    return tuple(replace(one, regions=(*op.regions, *one.regions)) for one in op.target.ops)
