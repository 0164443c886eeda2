"""Sizes that values of tensors decide: `x[mask]` has a row for each true element of `mask`.

    mask = labels >= 0             bool[b, 12]
    chosen = labels[mask]          i64[u0<=b*12]
    scores = logits[mask]          f32[u0<=b*12, 8]    the same size, as the same mask decides it

torch gives each such size a symbol, and knows nothing of it. Here it gets the name of the mask that decides it, and a
bound. Masks that are computed twice in the same way decide one size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from fxpipe.ir.graph.graph import Graph, Op, Ref, called, is_opaque, map_leaves, op_name, refs
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.shared_memory_values import memory
from fxpipe.ir.graph.value_types import Dim, TensorType, TupleType, ValueType, dim_names, tensors

FROM_VALUES = re.compile(r"\bu\d+\b")  # torch's names of sizes that depend on values


def mask_of(op: Op, types: Mapping[str, ValueType]) -> str | None:
    """The tensor whose elements other than zero say what an op selects, lists or replaces; None if there is none."""
    name = op_name(op)
    if name in ("nonzero", "argwhere") or (name == "where" and len(op.args) + len(op.kwargs) == 1):
        found = [argument(op, 0, "input")]
    elif name in ("masked_select", "masked_scatter"):
        found = [argument(op, 1, "mask")]
    elif name in ("getitem", "setitem", "index_put"):
        items = argument(op, 1, "indices")
        found = [item for item in refs(items) if _is_mask(types[item.name])]
    else:
        return None
    return found[0].name if len(found) == 1 and isinstance(found[0], Ref) else None


def _is_mask(kind: ValueType) -> bool:
    return isinstance(kind, TensorType) and kind.dtype in ("bool", "u8")


def unnamed_sizes(kind: ValueType) -> set[str]:
    """The sizes of a type that data decides, and of which no mask or bound is known, by torch's names."""
    names = {name for tensor in tensors(kind) for dim in tensor.shape for name in dim_names(dim)}
    return set(filter(FROM_VALUES.fullmatch, names))


def reads_numbers(graph: Graph) -> bool:
    """Whether the number of a tensor is read: by Python, or for a size by an op, as in `x.split([first, second])`."""
    numbers = {name for name, kind in graph.types.items() if isinstance(kind, TensorType) and not kind.shape}
    return any(
        called(op) == "item" or (unnamed_sizes(op.type) and not numbers.isdisjoint(op.operands)) for op in graph.ops
    )


def with_named_data_sizes(graph: Graph) -> Graph:
    """The graph, where sizes that a mask decides have a name and a bound; others keep torch's name."""
    given = {size.name for size in graph.sizes} | {item.name for item in graph.inputs}
    if not any(unnamed_sizes(op.type) - given for op in graph.ops):
        return graph
    types, first, texts, seen = dict(graph.types), first_equal(graph), dict[str, str](), set[str]()
    known: dict[Any, str] = {}
    taken = given | types.keys()
    names = (name for number in count() if (name := f"u{number}") not in taken)
    for op in graph.ops:
        new = unnamed_sizes(op.type) - given - seen
        seen |= new
        if isinstance(op.target, Opaque) and new:
            rows = op.target.about_rows(cut=any(item.batch_dim is not None for item in graph.inputs))
            texts |= {size: f"{next(names)}<={rows}" for size in sorted(new)}
        mask = mask_of(op, types) if len(new) == 1 else None
        if mask is not None and (shape := _selected(op, mask, types)) is not None:
            key = first[mask], shape
            if key not in known:
                known[key] = f"{next(names)}<={product(shape)}"
            texts[new.pop()] = known[key]
        types[op.name] = _named(types[op.name], texts)
    return replace(graph, ops=tuple(replace(op, type=types[op.name]) for op in graph.ops))


def _selected(op: Op, mask: str, types: Mapping[str, ValueType]) -> tuple[Dim, ...] | None:
    """The shape of the mask as the op uses it."""
    kind = types[mask]
    if not isinstance(kind, TensorType):
        return None
    if op_name(op) != "masked_select":
        return kind.shape
    whole = types.get(getattr(argument(op, 0, "input"), "name", ""))
    if not isinstance(whole, TensorType):
        return None
    rank = max(len(kind.shape), len(whole.shape))
    pairs = zip(*((*(1,) * (rank - len(one.shape)), *one.shape) for one in (kind, whole)), strict=True)
    return tuple(other if one == 1 else one for one, other in pairs)


def product(shape: tuple[Dim, ...]) -> str:
    """The number of elements of a shape, as text."""
    several = [f"({dim})" if isinstance(dim, str) and not dim.isidentifier() else str(dim) for dim in shape if dim != 1]
    return "*".join(several) or "1"


def _named(kind: ValueType, texts: Mapping[str, str]) -> ValueType:
    if isinstance(kind, TupleType):
        return TupleType(tuple(_named(item, texts) for item in kind.items))
    if not isinstance(kind, TensorType):
        return kind
    return replace(kind, shape=tuple(_dim(dim, texts) for dim in kind.shape))


def _dim(dim: Dim, texts: Mapping[str, str]) -> Dim:
    if isinstance(dim, int):
        return dim
    return texts.get(dim) or FROM_VALUES.sub(lambda name: f"({texts[name[0]]})" if name[0] in texts else name[0], dim)


def first_equal(graph: Graph) -> dict[str, str]:
    """For each value the first that is computed in the same way from the same values."""
    root = memory(graph.ops, graph.types)
    written = {root(name) for op in graph.ops for name in op.writes}
    first = {name: name for name in graph.types}
    made: dict[Any, str] = {}
    for op in graph.ops:
        if not (op.random or op.writes or is_opaque(op) or written & set(map(root, (op.name, *op.reads)))):
            same = map_leaves(
                (op.args, dict(op.kwargs)), lambda leaf: Ref(first[leaf.name]) if type(leaf) is Ref else leaf
            )
            first[op.name] = made.setdefault((op.target, repr(same), op.regions), op.name)
    return first
