"""Chooses for each value that backward needs whether forward keeps it or backward computes it again: selective
activation checkpointing.

Computed again is only what is cheap and has the same result: no products of matrices, no convolutions or attention,
nothing random, nothing that writes memory. Such ops wait for memory more than they compute, so what one costs is the
bytes that it reads and writes. Of what is kept, each piece of memory counts: a view is made again, and costs nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxpipe.ir.graph.graph import Op
from fxpipe.ir.graph.value_types import Dim, ScalarType, TupleType, ValueType, dim_size, nbytes
from fxpipe.ir.program.backward import Backward, first_half
from fxpipe.ir.program.program import Program, Stage
from fxpipe.passes.backward.minimum_cut import Computation, run_again
from fxpipe.torch_internals.operator_classes import OpOverload, schema

# A value is computed again if that needs less than this many bytes read and written for each byte that is not kept:
# of a chain of ops from one matrix product to the next it is, for the mean of each row of a large matrix it is not.
MOST_TRAFFIC = 64

_CHEAP = """
    native_layer_norm native_group_norm native_batch_norm _fused_rms_norm _softmax _safe_softmax _log_softmax
    cat stack _to_copy embedding index_select gather tril triu glu repeat flip roll log_sigmoid_forward
    constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
    max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
    full ones zeros full_like ones_like zeros_like new_full new_ones new_zeros arange scalar_tensor
"""
_CHANGING = {
    torch.Tag.nondeterministic_seeded, torch.Tag.nondeterministic_bitwise,
    torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output,
}  # fmt: skip


def is_cheap(target: Any) -> bool:
    """Whether a recorded function is cheap and has the same result again; views are always cheap."""
    if not isinstance(target, OpOverload):
        return target is torch.tensor or getattr(target, "__module__", "") == "_operator"  # of numbers, of sizes
    tags = set(target.tags)
    if target.namespace != "aten" or schema(target).is_mutable or tags & _CHANGING:
        return False
    name = schema(target).name.partition("::")[2]
    return bool(tags & {torch.Tag.pointwise, torch.Tag.reduction}) or name in _CHEAP


@dataclass(frozen=True)
class Recorded:
    """A stage's forward, as recorded.

    - `ops`: all of it, in order.
    - `cheap`: the names of those that are, by `is_cheap`.
    - `memory`: for each value the one that first had its memory, and the bytes of all that memory.
    - `writes_later`: the values whose memory backward writes.
    """

    ops: Sequence[Op]
    cheap: Collection[str]
    memory: Mapping[str, tuple[str, Dim]]
    types: Mapping[str, ValueType]
    writes_later: Collection[str] = ()


def computed_again(
    program: Program, stage: Stage, recorded: Recorded, read: Iterable[str], sizes: Mapping[str, int]
) -> list[Op]:
    """The recorded ops that backward runs again so that the values that it has to `read` are there, views among them.
    `sizes` has a number for each symbolic size of a micro-batch."""
    choice = _Choice(program, stage, recorded, sizes)
    computations = [choice.computation(place, group) for place, group in enumerate(choice.groups)]
    wanted = [name for name in dict.fromkeys(read) if name in choice.keeping]
    places = run_again(computations, wanted, choice.keeping)
    found = [choice.groups[place] for place in sorted(places)]
    made = {op.name for group in found if not choice.is_view(group) for op in group}
    return [op for group in found if not choice.is_kept_view(group, made) for op in group]


def in_halves(
    backward: Backward, again: Collection[str], types: Mapping[str, ValueType], sizes: Mapping[str, int]
) -> Backward:
    """The backward, with the ops `again` in the halves that run them if backward is split: a value that both halves
    need is handed from the first to the second, or computed in both, whichever hands on less memory."""
    first = first_half(backward, types)
    ops = {op.name: op for op in backward.ops if op.name in again}

    def cost(name: str) -> int:
        _, count = backward.memory.get(name, (name, nbytes(types[name], sizes)))
        return 0 if isinstance(types[name], TupleType) else MOST_TRAFFIC * dim_size(count, sizes)

    groups = list(_groups(list(ops.values())))
    computations = [
        Computation(makes(group), group[0].reads, 1 + sum(nbytes(types[x], sizes) for x in group[0].reads))
        for group in groups
    ]
    own = [op for op in backward.ops if op.name not in first and op.name not in ops]
    read = {name for op in own for name in op.reads}
    values = [*backward.keeps, *ops, *(name for op in ops.values() for name in op.reads)]
    keeping: dict[str, int | None] = {name: cost(name) for name in values}
    places = run_again(computations, [name for name in values if name in read], keeping)
    second = {op.name for place in places for op in groups[place]}
    read |= {name for op in second for name in ops[op].reads}
    early = set[str]()
    for group in reversed(groups):
        if any(op.name in first or op.name in early or op.name in read - second for op in group):
            early |= {op.name for op in group} | (set(group[0].reads) & ops.keys())
    return replace(backward, in_halves=(frozenset(early), frozenset(second)))


class _Choice:
    """What the minimum cut needs to know. `groups`: each op, with the parts of its result if that is a tuple;
    `keeping`: as of `run_again`."""

    def __init__(self, program: Program, stage: Stage, recorded: Recorded, sizes: Mapping[str, int]) -> None:
        self.stage, self.recorded, self.sizes = stage, recorded, sizes
        self.groups = list(_groups(recorded.ops))
        self.named = {op.name for op in stage.ops}
        numbers = {size.name for size in program.graph.sizes}
        here = {*stage.takes, *stage.states, *stage.borrows, *self.named, *numbers}
        self.states = {*stage.states, *stage.borrows}
        self.known = here | {op.name for op in recorded.ops}
        self.last_write: dict[str, int] = {}
        for place, group in enumerate(self.groups):
            self.last_write |= {self.owner(name): place for op in group for name in op.writes}
        self.last_write |= {self.owner(name): len(self.groups) for name in recorded.writes_later}
        self.last_write |= dict.fromkeys(stage.mutates, len(self.groups))  # the next micro-batch may have written it
        self.keeping: dict[str, int | None] = {name: self.bytes_of(name) for name in here}
        self.keeping |= {name: self.bytes_of(name) for name in self.known}

    def owner(self, name: str) -> str:
        return self.recorded.memory.get(name, (name, 0))[0]

    def bytes_of(self, name: str) -> int:
        """What keeping the value costs: the bytes of all its memory, in the unit of the cut."""
        kind = self.recorded.types[name]
        if self.owner(name) in self.states or isinstance(kind, (ScalarType, TupleType)):
            return 0
        _, count = self.recorded.memory.get(name, (name, nbytes(kind, self.sizes)))
        return MOST_TRAFFIC * dim_size(count, self.sizes)

    def computation(self, place: int, group: Sequence[Op]) -> Computation:
        """What these ops do, and whether they may run again. Notes what cannot be kept."""
        op = group[0]
        made = makes(group)
        if op.writes or op.random or any(name not in self.known for name in op.reads):
            return Computation(made, (), None)
        if isinstance(op.type, ScalarType) or self.is_view(group):
            self.keeping |= dict.fromkeys(made)  # the memory itself is kept
            return Computation(made, op.reads, 1)
        owners = {self.owner(name) for name in op.reads}
        changed = any(self.last_write.get(one, -1) >= place for one in owners)
        written = any(self.owner(name) in self.last_write for name in made)
        if op.name not in self.recorded.cheap or changed or written:
            return Computation(made, (), None)
        traffic = sum(nbytes(self.recorded.types[name], self.sizes) for name in (*op.reads, *made))
        return Computation(made, op.reads, traffic + 1)

    def is_view(self, group: Sequence[Op]) -> bool:
        """Whether all that the op makes is memory of what it reads."""
        owners = {self.owner(name) for name in group[0].reads}
        return all(self.owner(name) in owners for name in makes(group))

    def is_kept_view(self, group: Sequence[Op], made: Collection[str]) -> bool:
        """Whether these are views that have names in the stage, of memory that is kept anyway: they are kept, too.
        `made`: what is computed again."""
        return self.is_view(group) and all(x in self.named and self.owner(x) not in made for x in makes(group))


def makes(group: Sequence[Op]) -> tuple[str, ...]:
    """The values of a group: the result of its op, or the parts of it."""
    return tuple(part.name for part in group[1:]) or (group[0].name,)


def _groups(ops: Sequence[Op]) -> Iterator[list[Op]]:
    """Each op, followed by the parts of its result if that is a tuple."""
    parts: dict[str, list[Op]] = {}
    tuples = {op.name for op in ops if isinstance(op.type, TupleType)}
    for op in ops:
        if op.target is operator.getitem and op.reads and op.reads[0] in tuples:
            parts.setdefault(op.reads[0], []).append(op)
    inside = {op.name for several in parts.values() for op in several}
    for op in ops:
        if op.name not in inside:
            yield [op, *parts.get(op.name, ())]
