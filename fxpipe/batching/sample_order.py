"""In which order the rows of samples stand in a dimension that has the batch.

    x                                        f32[b, t, 8]    each sample once: parts (1, 1)
    x.flatten(0, 1)                          f32[t*b, 8]     all rows of a sample, then all of the next: (t, t)
    x.transpose(0, 1).flatten(0, 1)          f32[t*b, 8]     the first row of each sample, then the second: (t, 1)
    torch.cat((y, x.flatten(0, 1)))          f32[b + t*b, 8] (1, 1) (t, t)

A part (`many`, `block`) has many*b rows: block rows of the first sample, block of the second and so on, and that
many/block times. Only rows in the same order may meet, and a tensor may be cut only before the first sample.

Rows that are alike for all samples, as those of a class token that is expanded to the batch, are in any order.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import Any

from fxpipe.ir.graph.graph import Op, Ref, called, op_name, refs
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.ops import ARITHMETIC, CASTS, CONCATENATIONS, JOINS, PERMUTATIONS, POINTWISE, RESHAPES, SPLIT_OPS
from fxpipe.ir.graph.value_types import TensorType, sized_by_data, tensors

from .batch_facts import CONSTANTS, EXPANDS, REPEATS, Flow, Mixes, Part, batch_dims, many, multiple, number
from .sample_numbers import item_at
from .selected_rows import outer_of_selection

COMPUTED = {"mul": operator.mul, "add": operator.add, "sub": operator.sub, "floordiv": operator.floordiv}


def note_order(op: Op, flow: Flow) -> None:
    """Record the order of the rows of an op's result, and what of it is alike for all samples."""
    if not batch_dims(op.type) or op.name in flow.mixed:
        return
    if op.name not in flow.depends and (op.random or flow.drawn.intersection(op.reads)):
        flow.drawn.add(op.name)
    elif not op.random and not flow.counted.keys() & set(op.reads) and not flow.pooled.keys() & set(op.reads):
        _note_alike(op, flow)
    flow.order[op.name] = _order(op, flow)


def forget_alike(names: Iterable[str], flow: Flow) -> None:
    """Values that are written are no longer known to be alike."""
    for name in names:
        flow.alike.discard(name)
        flow.begins.pop(name, None)


def check_order(op: Op, flow: Flow) -> None:
    """Raise Mixes if an op takes rows of a sample for those of another one."""
    first = op.first
    kind, made = flow.types.get(first), op.type
    if op_name(op) in RESHAPES and isinstance(kind, TensorType) and isinstance(made, TensorType):
        if len(batch_dims(kind)) == len(batch_dims(made)) == 1 and _reshaped(kind, made, flow.parts(first)) is None:
            raise Mixes(op, f"takes samples apart: {kind} becomes {made}")
        return
    others = batch_dims(made) and not _takes_rows(op, flow) and not _joins_rows(op) and op_name(op) not in REPEATS
    joined = (name for name in _ordered(op, flow) if len(flow.parts(name)) > 1)
    if others and any(many(flow.types[name]) != many(made) for name in joined):
        raise Mixes(op, "makes other rows of samples from those that several things have one after another")


def check_meeting_rows(op: Op, flow: Flow) -> None:
    """Raise Mixes if an op pairs rows of samples that are in different orders."""
    if not _joins_rows(op):
        rows = [name for name in _ordered(op, flow) if many(flow.types[name]) == many(op.type)]
        if len({flow.parts(name) for name in rows}) > 1:
            raise Mixes(op, "pairs rows of samples that are in different orders")


def check_split(op: Op, kind: TensorType, batch: int, flow: Flow) -> None:
    """Raise Mixes unless the pieces of a dimension that has the batch are whole parts, or whole batches of them."""
    parts, start = flow.parts(op.first), _start(op, batch, flow)
    for piece in tensors(op.type):
        if dims := batch_dims(piece):
            size = multiple(piece.shape[dims[0]])
            if size is None or (size, start) != (multiple(kind.shape[batch]), 0):
                if size is None or start is None or _cut(parts, start, size) is None:
                    raise Mixes(op, f"cuts {kind} along the batch")
                start += size


def check_write(op: Op, flow: Flow) -> None:
    """Raise Mixes if an op writes rows of some samples, and not of others."""
    kind = flow.types.get(op.first)
    if not isinstance(kind, TensorType) or not (dims := batch_dims(kind)):
        return
    item: Any = slice(None)
    if op_name(op) == "setitem":
        item = item_at(op.args[1], dims[0], kind, flow)
    elif op_name(op) in ("select_scatter", "slice_scatter"):
        if argument(op, 2, "dim", 0) % len(kind.shape) != dims[0]:
            return
        item = slice(*(argument(op, 3 + at, key) for at, key in enumerate(("start", "end", "step"))))
        item = argument(op, 3, "index") if op_name(op) == "select_scatter" else item
    if item is None or (isinstance(item, Ref) and isinstance(flow.types.get(item.name), TensorType)):
        return
    start, stop = _ends(item, kind, flow) if isinstance(item, slice) else (None, None)
    if start is None or stop is None or _cut(flow.parts(op.first), start, stop - start) is None:
        raise Mixes(op, f"writes rows of some samples of {kind}, and not of others")


def _order(op: Op, flow: Flow) -> tuple[Part, ...]:
    rows = many(op.type) or 1
    if (outer := outer_of_selection(op, flow)) is not None:
        return (Part(rows, max(1, rows // outer)),)
    sources = [*_ordered(op, flow)] or [name for name in dict.fromkeys(op.reads) if batch_dims(flow.types[name])]
    if not sources:
        of_each = op_name(op) == "repeat_interleave"  # of what has no samples, for each of them
        return (Part(rows, 1 if of_each else rows),)
    if _joins_rows(op):
        joined = [ref.name for ref in refs(op.args) if ref.name in flow.types and batch_dims(flow.types[ref.name])]
        found: tuple[Part, ...] | None = _merged(part for name in joined for part in flow.parts(name))
    elif taken := _takes_rows(op, flow):
        start, size = taken[1], rows
        found = None if start is None else _cut(flow.parts(taken[0]), start, size)
    else:
        found = _like_sources(op, sources, rows, flow)
    return found if found is not None and sum(part.many for part in found) == rows else (Part(rows, rows),)


def _like_sources(op: Op, sources: list[str], rows: int, flow: Flow) -> tuple[Part, ...] | None:
    source = max(sources, key=lambda name: (many(flow.types[name]) == rows, flow.outer(name)))
    kind, made, parts = flow.types[source], op.type, flow.parts(source)
    of = many(kind) or 1
    if op_name(op) in ("repeat", "tile") and rows % of == 0:
        return _merged(parts * (rows // of)) if len(parts) > 1 else (Part(rows, parts[0].block),)
    flattens = op_name(op) == "repeat_interleave" and argument(op, 2, "dim") is None
    if (op_name(op) in RESHAPES or flattens) and isinstance(kind, TensorType) and isinstance(made, TensorType):
        return _reshaped(kind, made, parts) if len(batch_dims(kind)) == len(batch_dims(made)) == 1 else None
    return parts if rows == of else (Part(rows, max(1, rows // flow.outer(source))),)


def _reshaped(kind: TensorType, made: TensorType, parts: tuple[Part, ...]) -> tuple[Part, ...] | None:
    """The order in a tensor that has become another one; None if samples are taken apart."""
    (before, behind), (now_before, now_behind) = _around(kind), _around(made)
    rows = many(made)
    if rows is None or not before * behind * now_before * now_behind:  # a part of the batch
        return None
    if before == now_before:
        before = now_before = 1
    if len(parts) > 1 and (before, now_before) != (1, 1):
        return None
    whole = [Part(part.many * before * behind, part.block * behind) for part in parts]
    piece, left = divmod(sum(part.many for part in whole), now_before)
    if left or piece != rows * now_behind or (now_before > 1 and piece % whole[0].block):
        return None
    if now_before > 1:
        whole = [Part(piece, whole[0].block)]
    if any(part.block % now_behind for part in whole):
        return None
    return _merged(Part(part.many // now_behind, part.block // now_behind) for part in whole)


@lru_cache(maxsize=4096)
def _around(kind: TensorType) -> tuple[int, int]:
    """How many elements there are before the dimension with the batch, and behind it."""
    at = batch_dims(kind)[0]
    before, behind = (prod(number(size) for size in part) for part in (kind.shape[:at], kind.shape[at + 1 :]))
    return before, behind


def _cut(parts: tuple[Part, ...], start: int, size: int) -> tuple[Part, ...] | None:
    """The order in size*b rows from start*b on; None if these are not whole parts, or whole batches of them."""
    found: list[Part] = []
    for part in parts:
        first, last = max(start, 0), min(start + size, part.many)
        if first < last:
            if first % part.block or last % part.block:
                return None
            found.append(Part(last - first, part.block))
        start -= part.many
    return _merged(found)


def _merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """With one part in place of neighbours with the same blocks."""
    found: list[Part] = []
    for part in parts:
        if found and found[-1].block == part.block:
            found[-1] = Part(found[-1].many + part.many, part.block)
        else:
            found.append(part)
    return tuple(found)


def _ordered(op: Op, flow: Flow) -> Iterator[str]:
    """The values that an op reads whose rows are in an order: not alike, and not drawn at random."""
    for name in dict.fromkeys(op.reads):
        if batch_dims(flow.types[name]) and name not in flow.drawn and name not in flow.alike:
            yield name


def _joins_rows(op: Op) -> bool:
    """Whether the op concatenates along the dimension of the batch."""
    if op_name(op) not in JOINS or called(op) == "stack" or not isinstance(op.type, TensorType):
        return False
    dims, rank = batch_dims(op.type), len(op.type.shape)
    given = argument(op, 1, "dim", op.kwargs.get("axis", 0))
    along = {"hstack": min(1, rank - 1), "vstack": 0}.get(called(op), given)
    return bool(dims) and (not isinstance(along, int) or along % rank == dims[0])


def _takes_rows(op: Op, flow: Flow) -> tuple[str, int | None] | None:
    """The value of which an op takes rows, one after another, and where they begin, by the batch size; None for other
    ops."""
    made = flow.made.get(op.first)
    if made is not None and op_name(op) == "getitem" and op_name(made) in SPLIT_OPS and type(op.args[1]) is int:
        pieces = [(piece, batch_dims(piece)) for piece in tensors(made.type)]
        before = pieces[: op.args[1] % len(pieces)]
        if many(op.type) == many(flow.types[made.first]):
            return made.first, 0  # split along another dimension
        return made.first, sum(multiple(piece.shape[dims[0]]) or 0 for piece, dims in before if dims)
    kind = flow.types.get(op.first)
    if not isinstance(kind, TensorType) or not (dims := batch_dims(kind)):
        return None
    looks_up = op_name(op) == "getitem" and isinstance(item_at(op.args[1], dims[0], kind, flow), Ref)
    if looks_up or op_name(op) not in ("getitem", "narrow", *SPLIT_OPS):
        return None
    return op.first, _start(op, dims[0], flow)


def _start(op: Op, batch: int, flow: Flow) -> int | None:
    """Where the rows that an op takes along the batch begin, by the batch size; None if it is no multiple of it."""
    start: Any = 0
    kind = flow.types[op.first]
    if not isinstance(kind, TensorType):
        return None
    if op_name(op) == "narrow":
        dim = argument(op, 1, "dim")
        start = argument(op, 2, "start") if isinstance(dim, int) and dim % len(kind.shape) == batch else 0
    elif op_name(op) == "getitem":
        item = item_at(op.args[1], batch, kind, flow)
        if isinstance(item, slice):
            return _ends(item, kind, flow)[0]
    return _times(start, kind, flow)


def _ends(item: slice, kind: TensorType, flow: Flow) -> tuple[int | None, int | None]:
    """Where a slice of the batch begins and ends, by the batch size; None if that is no multiple of it."""
    if item.step not in (None, 1):
        return None, None
    stop = many(kind) if item.stop in (None, sys.maxsize) else _times(item.stop, kind, flow)
    return _times(item.start or 0, kind, flow), stop


def _times(place: Any, kind: TensorType, flow: Flow) -> int | None:
    """A place in the batch by the batch size; None if it is no multiple of it."""
    one, two, five = (_number(place, flow, rows) for rows in (1, 2, 5))
    if one is None or two != 2 * one or five != 5 * one:
        return None
    return one if one >= 0 else one + (many(kind) or 0)


def _number(value: Any, flow: Flow, rows: int) -> int | None:
    """What a number in the graph is for a batch of so many rows; None if it is not known."""
    if isinstance(value, int):
        return value
    made = flow.made.get(value.name) if isinstance(value, Ref) else None
    if made is None:
        return number(value.name, rows) if isinstance(value, Ref) else None
    if op_name(made) == "neg":
        of = _number(made.args[0], flow, rows)
        return None if of is None else -of
    parts = [_number(part, flow, rows) for part in made.args]
    if op_name(made) not in COMPUTED or len(parts) != 2 or parts[0] is None or parts[1] is None:
        return None
    found: int = COMPUTED[op_name(made)](parts[0], parts[1])
    return found


def _note_alike(op: Op, flow: Flow) -> None:
    """Record in `flow.alike` if all rows of an op's result are alike, or in `flow.begins` if its first elements are, in
    one dimension."""
    name, kind = op_name(op), op.type
    if not isinstance(kind, TensorType) or sized_by_data(kind):
        return
    others = [read for read in op.reads if batch_dims(flow.types[read]) and read not in flow.alike]
    if name in CONSTANTS or (not others and _keeps_alike(op, kind, flow)):
        flow.alike.add(op.name)
    elif name in CONCATENATIONS and not _joins_rows(op):
        items = [(ref.name, flow.types[ref.name]) for ref in refs(op.args[:1])]
        there = ((item, of.shape) for item, of in items if isinstance(of, TensorType) and of.shape != (0,))
        first, shape = next(there, ("", ()))  # torch takes an empty list of numbers with tensors of any rank
        dim = argument(op, 1, "dim", op.kwargs.get("axis", 0))
        size = shape[dim] if first and isinstance(dim, int) else None
        if first not in others and isinstance(size, int):
            flow.begins[op.name] = dim % len(kind.shape) - len(kind.shape), size
    elif name in ARITHMETIC | POINTWISE | CASTS:
        begins = {flow.begins.get(read) for read in others}
        if len(begins) == 1 and (found := begins.pop()) is not None:
            flow.begins[op.name] = found
    elif name == "getitem" and (found := flow.begins.get(op.first)) is not None:
        whole = flow.types[op.first]
        index: list[Any] = [*op.args[1]] if isinstance(op.args[1], tuple) else [op.args[1]]
        at = found[0] + (len(whole.shape) if isinstance(whole, TensorType) else 0)
        if len(index) == at + 1 and all(one == slice(None) for one in index[:at]) and _within(index[at], found[1]):
            flow.alike.add(op.name)


def _within(item: Any, size: int) -> bool:
    """Whether an index finds only some of the first `size` elements."""
    if isinstance(item, slice):
        start = 0 if item.start is None else item.start
        return type(start) is int and type(item.stop) is int and start >= 0 and 0 <= item.stop <= size
    return type(item) is int and 0 <= item < size


def _keeps_alike(op: Op, kind: TensorType, flow: Flow) -> bool:
    """Whether the rows of an op's result are alike if those of its arguments are, or these have no samples."""
    name, source, rows = op_name(op), flow.types.get(op.first), many(kind) or 1
    batched = isinstance(source, TensorType) and bool(batch_dims(source))
    if name in REPEATS:
        return batched or rows == 1
    if name in RESHAPES:
        whole = isinstance(source, TensorType) and batched and _around(source)[0] == _around(kind)[0]
        return whole and (many(flow.types[op.first]) or 1) % rows == 0
    return name in EXPANDS | ARITHMETIC | POINTWISE | CASTS | PERMUTATIONS
