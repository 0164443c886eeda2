"""How a stage computes gradients, as ops: what its forward keeps, and what its backward does with it.

    keeps    x, relu                              forward keeps these values for backward
    roots    dy, the gradient of y                arrives from the stages that take y
    ops      drelu = mm(dy, weight)  ...          in the order in which autograd runs them
    takes    x: dx                                goes to the stage that gave x; None where there is no gradient
    weights  weight: dweight                      is added to the model's gradient

`halves` splits the ops in two, as the zero-bubble schedules want it: those that some gradient of a take needs, and the
rest, which only the weights wait for.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fxpipe.ir.graph.graph import Op, show_op
from fxpipe.ir.graph.shared_memory_values import memory
from fxpipe.ir.graph.value_types import Dim, ObjectType, TupleType, ValueType

GRAPH = ObjectType("graph of autograd")  # kept for the gradients of an op that is kept whole


@dataclass(frozen=True)
class Backward:
    """The backward of a stage. The pairs are of a value and the name of its gradient.

    - `keeps`: the values that forward keeps, in order.
    - `roots`: the results of the stage that can have a gradient; "" for one whose gradient never arrives.
    - `ops`: what backward computes.
    - `takes`: the arguments of the stage that can have a gradient; "" for one that the results do not depend on.
    - `weights`: the tensors of the model, owned or borrowed, that the results depend on.
    - `memory`: for each tensor the one that first had its memory, and the bytes of all that memory: a view keeps the
      whole of what it is a view of.
    - `orders`: for each argument of the stage its dimensions from the largest stride to the smallest, () for a
      contiguous one; empty if all are contiguous.
    - `scattered`: results of the stage that are not dense in memory, such as `x[:, 0]`. Who takes one copies it.
    - `recomputed`: the ops that compute again what forward has computed and not kept; views are not counted.
    - `in_halves`: of all ops that have run in forward, views too, those that run in the first half, and those that run
      in the second; empty where each runs in the half that reads it, the first if both do.
    - `repeats`: for each op of the stage that they are of, the share of its work that runs again.
    """

    keeps: tuple[str, ...]
    roots: tuple[tuple[str, str], ...]
    ops: tuple[Op, ...]
    takes: tuple[tuple[str, str], ...]
    weights: tuple[tuple[str, str], ...]
    memory: Mapping[str, tuple[str, Dim]] = field(default_factory=dict, compare=False)
    orders: tuple[tuple[int, ...], ...] = ()
    scattered: frozenset[str] = field(default=frozenset(), compare=False)
    recomputed: frozenset[str] = frozenset()
    in_halves: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    repeats: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def arriving(self) -> tuple[str, ...]:
        """The gradients that backward begins with."""
        return tuple(gradient for _, gradient in self.roots if gradient)

    @property
    def reaches(self) -> tuple[tuple[int, ...], ...]:
        """For each gradient of a take and then of a weight, the roots, by place, that it depends on; () if each depends
        on all."""
        behind = {gradient: {place} for place, (_, gradient) in enumerate(self.roots) if gradient}
        everything = set().union(*behind.values())
        for op in self.ops:
            behind[op.name] = set().union(*(behind.get(name, set()) for name in op.reads))
            for name in op.writes:
                behind[name] = behind.get(name, set()) | behind[op.name]
        found = [behind.get(gradient, set()) for _, gradient in (*self.takes, *self.weights)]
        uniform = all(places == everything for places, (_, gradient) in zip(found, (*self.takes, *self.weights),
                      strict=True) if gradient)  # fmt: skip
        return () if uniform else tuple(tuple(sorted(places)) for places in found)


def accumulated(backward: Backward) -> dict[str, int]:
    """The gradients of weights that are complete, and needed for nothing else, as soon as an op has computed them; with
    their places among all that backward returns for weights. So it can add them up."""
    gradients = [gradient for _, gradient in backward.weights]
    others = {gradient for _, gradient in backward.takes}
    made: set[str] = set()
    for op in backward.ops:
        others.update(op.reads)
        made = {op.name} if op.writes else made | {op.name}  # what was made before may share the memory
    return {
        gradient: place
        for place, gradient in enumerate(gradients)
        if gradient in made and gradient not in others and gradients.count(gradient) == 1
    }


@dataclass(frozen=True)
class Halves:
    """A backward in two halves: the ops of each, and the values that the first hands to the second."""

    first: tuple[Op, ...]
    hands: tuple[str, ...]
    second: tuple[Op, ...]


def halves(backward: Backward, types: Mapping[str, ValueType]) -> Halves:
    """The ops that the gradients of the takes need, and the others."""
    wanted = first_half(backward, types)
    chosen = frozenset().union(*backward.in_halves)
    first = tuple(op for op in backward.ops if op.name in (backward.in_halves[0] if op.name in chosen else wanted))
    later = {op.name for op in backward.ops if op.name not in wanted | chosen} | backward.in_halves[1]
    second = tuple(op for op in backward.ops if op.name in later)
    known = {*backward.keeps, *backward.arriving, *(op.name for op in first)}
    read = {name for op in second for name in op.reads} | {gradient for _, gradient in backward.weights}
    read -= {op.name for op in second}
    order = (*backward.keeps, *backward.arriving, *(op.name for op in first))
    return Halves(first, tuple(name for name in order if name in known & read), second)


def first_half(backward: Backward, types: Mapping[str, ValueType]) -> set[str]:
    """The names of the ops that the gradients of the takes need. A tuple is unpacked at once: kept as a whole, it would
    keep parts that nobody needs."""
    wanted = needed(backward.ops, {gradient for _, gradient in backward.takes if gradient}, types)
    parts = (op for op in backward.ops if op.target is operator.getitem and isinstance(types[op.reads[0]], TupleType))
    return wanted | {op.name for op in parts if op.reads[0] in wanted}


def needed(ops: Sequence[Op], wanted: Collection[str], types: Mapping[str, ValueType]) -> set[str]:
    """The names of the ops that have to run, in their order, before the other ones, so that the `wanted` values are
    right: those that these values are computed from; those that write the memory that they read; and those that read
    memory before it is written."""
    root = memory(ops, types)
    found, sought = set[str](), set(wanted)
    grown = True
    while grown:
        grown, written = False, set[str]()
        for op in reversed(ops):
            if op.name in found:
                written |= {root(name) for name in op.writes}
                continue
            read_before = written and any(root(name) in written for name in op.reads)
            writes = any(root(name) in {root(other) for other in sought} for name in op.writes)
            if op.name in sought or writes or read_before:
                found.add(op.name)
                sought |= {*op.reads, op.name}
                written |= {root(name) for name in op.writes}
                grown = True
    return found


def show(backward: Backward) -> list[str]:
    """The lines of a backward."""
    lines = [f"keeps    {name}" for name in backward.keeps]
    lines += [f"arrives  {gradient or 'nothing'}: the gradient of {name}" for name, gradient in backward.roots]
    lines += [show_op(op) for op in backward.ops]
    lines += [f"returns  {gradient or 'nothing'}: the gradient of {name}" for name, gradient in backward.takes]
    return [*lines, *(f"adds     {gradient}: to the gradient of {name}" for name, gradient in backward.weights)]
