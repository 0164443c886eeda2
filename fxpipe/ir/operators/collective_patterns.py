"""Finds ops in a placed graph that are a collective: each of several devices has one part, and all of them make the
same, or each its slice of the same, from all parts.

    all-reduce       device 0   y_sum = y_partial + y_partial_0
                     device 1   y_sum_0 = y_partial + y_partial_0
    reduce-scatter   device 0   y_sum = y_partial[0:4] + y_partial_0[0:4]
                     device 1   y_sum_0 = y_partial[4:8] + y_partial_0[4:8]
    all-gather       device 0   x = cat([x_0, x_1])
                     device 1   x_joined = cat([x_0, x_1])
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxpipe.ir.graph.graph import Op, Ref, op_name
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.program.device_programs import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

from .placed_graph import Placed

TYPES = frozenset(("f64", "f32", "f16", "bf16"))  # of which all backends of torch.distributed have sums


@dataclass(frozen=True)
class CollectivePattern:
    """Ops of several devices that are a collective.

    - `kind`: "all-reduce", "reduce-scatter" or "all-gather".
    - `parts`: what each device gives, in the order in which parts are added or joined.
    - `made`: for the device of each part the ops that add or join, the last of which is the result.
    - `cuts`: for each part the ops that cut slices of it for a reduce-scatter, on its own device.
    - `dim`: the dimension of slices.
    """

    kind: str
    parts: tuple[str, ...]
    made: tuple[tuple[str, ...], ...]
    cuts: tuple[tuple[str, ...], ...] = ()
    dim: int = 0

    @property
    def results(self) -> tuple[str, ...]:
        """What the device of each part gets."""
        return tuple(made[-1] for made in self.made)


@dataclass(frozen=True)
class _Maker:
    """Ops of one device that make something of all parts: `slice`, first and last index; `cuts`: the parts' slices."""

    made: tuple[str, ...]
    cuts: tuple[str, ...] = ()
    slice: tuple[int, int] | None = None


def collective_patterns(placed: Placed) -> tuple[CollectivePattern, ...]:
    """The ops that are a collective: of floating-point parts of one type. Partial sums have no other users; slices are
    equal, and in the order of the devices' parts."""
    graph = placed.graph
    ops = {op.name: op for op in graph.ops}
    users: dict[str, list[str]] = {}
    for op in graph.ops:
        for name in dict.fromkeys((*op.reads, *op.writes)):
            users.setdefault(name, []).append(op.name)
    for output in graph.outputs:
        users.setdefault(output.value, []).append("")
    alike: dict[tuple[str, tuple[str, ...], int], list[_Maker]] = {}
    for op in graph.ops:
        if op_name(op) == "cat" and (joined := _joined(op)) is not None:
            alike.setdefault((ALL_GATHER, *joined), []).append(_Maker((op.name,)))
        elif _adds(op) and not any(_continues(ops.get(user), op, placed) for user in users.get(op.name, ())):
            added, adds = _chain(op, ops, users, placed)
            slices = [_slice(ops.get(name)) for name in added]
            one = slices[0]
            if one is not None and all(some is not None and some[1:] == one[1:] for some in slices):
                parts = tuple(part for part, *_ in filter(None, slices))
                alike.setdefault((REDUCE_SCATTER, parts, one[1]), []).append(_Maker(adds, added, one[2:]))
            else:
                alike.setdefault((ALL_REDUCE, added, 0), []).append(_Maker(adds))
    return tuple(_found(placed, ops, users, alike))


def _found(
    placed: Placed,
    ops: Mapping[str, Op],
    users: Mapping[str, list[str]],
    alike: Mapping[tuple[str, tuple[str, ...], int], list[_Maker]],
) -> Iterator[CollectivePattern]:
    for (kind, parts, dim), makers in alike.items():
        given = [ops.get(part) for part in parts]
        devices = [placed.devices[op.name] for op in given if op is not None]
        on = {placed.devices[maker.made[-1]]: maker for maker in makers}
        everywhere = len(set(devices)) == len(parts) == len(makers) == len(on) and set(devices) == set(on)
        if not everywhere or any(op is None or op.writes for op in given):
            continue
        ordered = [on[device] for device in devices]
        cuts = tuple(zip(*(maker.cuts for maker in ordered), strict=True))  # by part
        here = {name for maker in makers for name in (*maker.made, *maker.cuts)}
        inner = (*parts, *(cut for some in cuts for cut in some)) if kind != ALL_GATHER else ()
        alone = all(here.issuperset(users[name]) for name in inner)
        at_home = all(
            placed.devices[cut] == device for some, device in zip(cuts, devices, strict=False) for cut in some
        )
        if alone and at_home and _fits(kind, dim, [ops[part].type for part in parts], ordered, ops):
            yield CollectivePattern(kind, parts, tuple(maker.made for maker in ordered), cuts, dim)


def _fits(kind: str, dim: int, parts: Sequence[Any], makers: Sequence[_Maker], ops: Mapping[str, Op]) -> bool:
    """Whether the parts have one type, and so do the results, with equal slices of the whole in order."""
    part, n = parts[0], len(parts)
    made = {ops[name].type for maker in makers for name in maker.made}
    result = next(iter(made))
    if len({*parts}) > 1 or len(made) > 1 or not isinstance(part, TensorType) or not isinstance(result, TensorType):
        return False
    if part.dtype not in TYPES or (part.dtype, part.grad) != (result.dtype, result.grad):
        return False
    whole, slice_ = (result, part) if kind == ALL_GATHER else (part, result)
    if kind == ALL_REDUCE:
        return whole.shape == slice_.shape
    size: Any = slice_.shape[dim]
    slices = [maker.slice for maker in makers]
    in_order = kind == ALL_GATHER or slices == [(at * size, (at + 1) * size) for at in range(n)]
    return in_order and whole.shape == (*slice_.shape[:dim], n * size, *slice_.shape[dim + 1 :])


def _joined(op: Op) -> tuple[tuple[str, ...], int] | None:
    """The parts that a `cat` joins, and the dimension; None if these are no values of a known order."""
    match op.args:
        case (list(refs) | tuple(refs), int(dim)) if not op.kwargs and dim >= 0:
            names = tuple(ref.name for ref in refs if isinstance(ref, Ref))
            return (names, dim) if len(names) == len(refs) > 1 else None
    return None


def _slice(op: Op | None) -> tuple[str, int, int, int] | None:
    """A slice of one dimension: what it is of, the dimension, and the first and last index. None for another op."""
    if op is None or op.target is not operator.getitem or not isinstance(op.args[0], Ref):
        return None
    index = op.args[1]
    if not isinstance(index, tuple) or not all(isinstance(one, slice) and one.step is None for one in index):
        return None
    found = [(dim, one.start or 0, one.stop) for dim, one in enumerate(index) if one != slice(None)]
    return (op.args[0].name, *found[0]) if len(found) == 1 else None


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
