"""Finds sums in a placed graph that are an all-reduce: each of several devices has made one part, and all of them add
up the same parts, in the same order.

    device 0   y_partial = linear(x_0, w_0)          y_sum = y_partial + y_partial_0
    device 1   y_partial_0 = linear(x_1, w_1)        y_sum_0 = y_partial + y_partial_0
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fxpipe.ir.graph.graph import Op, Ref
from fxpipe.ir.graph.value_types import TensorType

from .placed_graph import Placed

SUMMED = frozenset(("f64", "f32", "f16", "bf16"))  # the types of which all backends of torch.distributed have sums


@dataclass(frozen=True)
class PartialSum:
    """A sum that each device of a group has.

    - `parts`: the part that each device makes, in the order in which they are added.
    - `adds`: for the device of each part the ops that add up, the last of which is the sum.
    """

    parts: tuple[str, ...]
    adds: tuple[tuple[str, ...], ...]

    @property
    def sums(self) -> tuple[str, ...]:
        """The sum on the device of each part."""
        return tuple(adds[-1] for adds in self.adds)


def partial_sums(placed: Placed) -> tuple[PartialSum, ...]:
    """The sums that are an all-reduce: of floating-point parts of one type, which nothing else uses or writes."""
    graph = placed.graph
    ops = {op.name: op for op in graph.ops}
    users: dict[str, list[str]] = {}
    for op in graph.ops:
        for name in dict.fromkeys((*op.reads, *op.writes)):
            users.setdefault(name, []).append(op.name)
    for output in graph.outputs:
        users.setdefault(output.value, []).append("")
    alike: dict[tuple[str, ...], list[tuple[str, tuple[str, ...]]]] = {}
    for op in graph.ops:
        if _adds(op) and not any(_continues(ops.get(user), op, placed) for user in users.get(op.name, ())):
            parts, adds = _chain(op, ops, users, placed)
            alike.setdefault(parts, []).append((op.name, adds))
    return tuple(_found(placed, ops, users, alike))


def _found(
    placed: Placed,
    ops: Mapping[str, Op],
    users: Mapping[str, list[str]],
    alike: Mapping[tuple[str, ...], list[tuple[str, tuple[str, ...]]]],
) -> Iterator[PartialSum]:
    for parts, sums in alike.items():
        made = [ops.get(part) for part in parts]
        devices = [placed.devices[op.name] for op in made if op is not None]
        sum_on = {placed.devices[name]: adds for name, adds in sums}
        users_here = {name for _, adds in sums for name in adds}
        everywhere = len(set(devices)) == len(parts) == len(sums) == len(sum_on) and set(devices) == set(sum_on)
        if not everywhere or any(op is None or op.writes for op in made):
            continue
        types = {ops[name].type for name in (*parts, *users_here)}
        kind = next(iter(types))
        floating = isinstance(kind, TensorType) and kind.dtype in SUMMED
        if len(types) == 1 and floating and all(users_here.issuperset(users[part]) for part in parts):
            yield PartialSum(parts, tuple(sum_on[device] for device in devices))


def _adds(op: Op | None) -> bool:
    """Whether the op is the sum of two values."""
    if op is None or op.target is not operator.add or op.kwargs:
        return False
    return len(op.args) == 2 and all(isinstance(arg, Ref) for arg in op.args)


def _continues(user: Op | None, op: Op, placed: Placed) -> bool:
    """Whether `user` adds something to the sum `op`, on the same device."""
    if user is None or not _adds(user) or placed.devices[user.name] != placed.devices[op.name]:
        return False
    first: Any = user.args[0]
    return bool(first.name == op.name)


def _chain(
    last: Op, ops: Mapping[str, Op], users: Mapping[str, list[str]], placed: Placed
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a chain of sums adds up, in order, and its ops. `last` is its last op."""
    parts, adds, at = list[str](), list[str](), last
    while True:
        first, second = (arg.name for arg in at.args)
        adds.insert(0, at.name)
        parts.insert(0, second)
        before = ops.get(first)
        if before is None or not _adds(before) or len(users[first]) > 1 or not _continues(at, before, placed):
            return (first, *parts), tuple(adds)
        at = before
