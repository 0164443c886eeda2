"""Rows of a batch that are sorted, computed one by one, and put back in their places: no samples are mixed.

    ids, perm = sort(expert)             i64[b], i64[b]    keys, and where each of them was
    rows = tokens[perm]                  f32[b, 8]         sorted, too: the rows of the keys
    ends = cumsum(histc(ids, 4))         i64[4]            where the rows of each expert end
    made = grouped_mm(rows, w, ends)     f32[b, 6]         each row is multiplied by the weights of its own expert
    back = empty_like(perm)
    back[perm] = arange(len(perm))       i64[b]            where each row is now
    made[back]                           f32[b, 6]         in the order of the tokens again

Routers of mixtures of experts that drop no token do this. Sorted rows may meet others that are sorted by the same keys,
and what is the same for all samples. What meets other samples, or leaves the graph sorted, is mixed. Keys are taken to
be numbers of experts, none of them negative.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fxpipe.ir.graph.graph import Op, Ref, op_name
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.ops import LIKE
from fxpipe.ir.graph.value_types import Dim, TensorType, ValueType, in_vmap, tensors

from .batch_facts import Flow, Mixes, Sorted, batch_dims, multiple, number

CASTS = {"to", "int", "long", "float", "double"}
ROWS = ("rows", "keys")
GROUPED = {"grouped_mm", "_grouped_mm", "grouped_mm_fallback"}  # torch's, and that of transformers


def follow_sorted(op: Op, flow: Flow) -> bool:
    """Record what is known about the result of an op that sorts rows, or reads sorted ones. Returns whether nothing
    else is to be checked. Raises Mixes if sorted rows meet others."""
    sorts = {id(fact.sort): fact.sort for name in op.reads if (fact := flow.sorted.get(name))}
    if len(sorts) > 1 or (sorts and in_vmap(op.type)):
        raise next(iter(sorts.values()))
    if sorts and _puts_back(op, flow):
        return True
    found = (_of_sort(op, flow) or _gathered(op, flow) or _multiplied(op, flow)) if sorts else _sort(op, flow)
    known = found is not None
    if sorts and not known and batch_dims(op.type):
        found = _row_by_row(op, flow, *sorts.values())
    if found is not None:
        flow.sorted[op.name] = found
    return known


def _sort(op: Op, flow: Flow) -> Sorted | None:
    """What an op makes that sorts keys along the batch, the smallest first."""
    name, kind = op_name(op), _type(op, 0, flow)
    if name not in ("sort", "argsort") or kind is None or len(kind.shape) != 1 or not multiple(kind.shape[0]):
        return None
    keys = op.args[0].name
    if argument(op, 2, "descending") or keys in flow.counted or flow.outer(keys) > 1:
        return None
    sort = Mixes(op, f"{name} runs along the batch, dimension 0 of {kind}")
    return Sorted(sort, kind.shape[0], "pair" if name == "sort" else "positions")


def _of_sort(op: Op, flow: Flow) -> Sorted | None:
    """What an op makes of the keys or positions of a sort."""
    of, name, other = _fact(op, 0, flow), op_name(op), argument(op, 1, "other")
    if name == "setitem":
        at = _index(op, flow)
        if at is None or (at.holds, at.each) != ("positions", 1) or not _is_arange(op.args[2], flow):
            return None
        return replace(at, holds="places")
    if of is None:
        return None
    match of.holds, name:
        case "pair", "getitem":
            return replace(of, holds="positions" if other else "keys")
        case "keys" | "counts" | "ends", _ if name in CASTS and "bool" not in str(op.type):
            return of
        case "positions", "floordiv" | "floor_divide" if of.each == 1 and isinstance(other, int) and other > 0:
            return replace(of, each=other)
        case "positions", "argsort" if of.each == 1 and not argument(op, 2, "descending"):
            return replace(of, holds="places")
        case "keys", "histc" if _a_bin_for_each(op):
            return replace(of, holds="counts")
        case "counts", "cumsum":
            return replace(of, holds="ends")
    return None


def _a_bin_for_each(op: Op) -> bool:
    """Whether a `histc` counts each whole number from 0 on by itself."""
    bins = argument(op, 1, "bins") or 100
    return (argument(op, 2, "min"), argument(op, 3, "max")) == (0, bins - 1)


def _gathered(op: Op, flow: Flow) -> Sorted | None:
    """The sorted rows that an op takes of the samples' by the positions of a sort."""
    at = _index(op, flow)
    if at is None or not _fits(op, flow) or _fact(op, 0, flow) is not None or op.args[0].name in flow.counted:
        return None
    return replace(at, holds="keys" if op.args[0] == at.sort.op.args[0] else "rows", each=1)


def _multiplied(op: Op, flow: Flow) -> Sorted | None:
    """The rows that an op makes of sorted rows, each with the weights of its own key."""
    rows, weights, ends = _fact(op, 0, flow), _type(op, 1, flow), argument(op, 2, "offs")
    if op_name(op) not in GROUPED or weights is None or not isinstance(ends, Ref):
        return None
    if any(name in flow.depends and name not in flow.sorted for name in op.reads):
        return None
    kind, last = flow.types[ends.name], flow.sorted.get(ends.name)
    many = kind.shape[0] if isinstance(kind, TensorType) else None
    return rows if _are(rows, *ROWS) and _are(last, "ends") and many == weights.shape[0] else None


def _puts_back(op: Op, flow: Flow) -> bool:
    """Whether an op puts sorted rows into the places that they came from."""
    name, at = op_name(op), _index(op, flow)
    if name in ("getitem", "index_select"):
        return _are(at, "places") and _are(_fact(op, 0, flow), *ROWS)
    if name == "index_add" and (_fact(op, 0, flow) is not None or not _fits(op, flow)):
        return False
    return name in ("setitem", "index_add") and _fits(op, flow) and _are(_fact(op, -1, flow), *ROWS)


def _row_by_row(op: Op, flow: Flow, sort: Mixes) -> Sorted:
    """The rows that an op makes of sorted rows and what is the same for all samples."""
    batched = [name for name in op.reads if batch_dims(flow.types[name])]
    sizes = {size for name in batched for size in _sizes(flow.types[name])} | {*_sizes(op.type)}
    if len(sizes) > 1 or not (op_name(op) in LIKE or all(_are(flow.sorted.get(name), *ROWS) for name in batched)):
        raise sort
    return Sorted(sort, sizes.pop(), "rows")


# What an op is called with --------------------------------------------------------------------------------------------


def _fact(op: Op, position: int, flow: Flow) -> Sorted | None:
    value = op.args[position] if op.args else None
    return flow.sorted.get(value.name) if isinstance(value, Ref) else None


def _type(op: Op, position: int, flow: Flow) -> TensorType | None:
    value = op.args[position] if len(op.args) > position else None
    kind = flow.types.get(value.name) if isinstance(value, Ref) else None
    return kind if isinstance(kind, TensorType) else None


def _are(fact: Sorted | None, *holds: str) -> bool:
    return fact is not None and fact.holds in holds


def _index(op: Op, flow: Flow) -> Sorted | None:
    """What is known of the index of an op that looks up, or writes, along the first dimension."""
    name = op_name(op)
    if name in ("index_select", "index_add") and argument(op, 1, "dim") == 0:
        given = argument(op, 2, "index")
    else:
        given = op.args[1] if name in ("getitem", "setitem") else None
    return flow.sorted.get(given.name) if isinstance(given, Ref) else None


def _fits(op: Op, flow: Flow) -> bool:
    """Whether the index of an op are the positions of a sort of as many keys as its first argument has rows, or of
    `each` keys a row."""
    kind, at = _type(op, 0, flow), _index(op, flow)
    if kind is None or at is None or at.holds != "positions" or batch_dims(kind) != (0,):
        return False
    return number(at.many) == at.each * number(kind.shape[0])


def _sizes(kind: ValueType) -> Iterator[Dim]:
    for tensor in tensors(kind):
        yield from (tensor.shape[dim] for dim in batch_dims(tensor))


def _is_arange(value: Any, flow: Flow) -> bool:
    """Whether a value is 0, 1, 2 and so on."""
    made = flow.counted.get(value.name) if isinstance(value, Ref) else None
    return made is not None and made.name == value.name and op_name(made) == "arange" and len(made.args) == 1
