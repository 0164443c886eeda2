"""Rows of samples that a mask selects: `x[mask]`.

    mask = labels >= 0             bool[b, 12]
    chosen = logits[mask]          f32[u0<=b*12, 8]    rows of the samples, in their order
    total = chosen.sum()           f32[]               a sum over the samples
    mean = chosen.mean()           f32[]               no mean over the samples, which have different numbers of rows
    back[mask] = chosen            f32[b, 12, 8]       in their places again

A micro-batch selects of its samples what the batch selects of them. Such rows may meet what the same mask has selected,
and what is the same for all samples. Others are mixed: the batch may have as many of both, and a micro-batch not.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from fxpipe.ir.graph.graph import Op, Ref, op_name, refs
from fxpipe.ir.graph.op_arguments import arguments
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.ops import CASTS
from fxpipe.ir.graph.value_types import TensorType, ValueType, data_sizes, dim_size, tensors
from fxpipe.runtime.microbatch import checked_places

from .batch_facts import Flow, Mixes, batch_dims, number
from .data_sizes import mask_of

PUTS = {"setitem", "index_put", "masked_scatter"}


@lru_cache(maxsize=4096)
def selected(kind: ValueType) -> frozenset[str]:
    """The names of the sizes that data decides in dimensions with samples."""
    return frozenset(
        name for tensor in tensors(kind) for dim in batch_dims(tensor) for name in data_sizes(tensor.shape[dim])
    )


def rows_each(kind: ValueType, dims: frozenset[int] | None = None) -> int | None:
    """How many elements, in all dimensions or these, there are for each row that a mask selects; None if not known."""
    if not isinstance(kind, TensorType) or len(names := selected(kind)) != 1:
        return None
    shape = [dim for at, dim in enumerate(kind.shape) if dims is None or at in dims]
    try:
        one, two = (prod(dim_size(dim, dict.fromkeys(names, rows)) for dim in shape) for rows in (1, 2))
    except ValueError:  # sizes of inputs
        return None
    return one if two == 2 * one else None


def outer_of_selection(op: Op, flow: Flow) -> int | None:
    """What stands before the batch in the rows that an op selects: t if the mask is of [t, b]. None for other ops."""
    mask = mask_of(op, flow.types)
    if mask is None or not selected(op.type) - selected(flow.types[mask]):
        return None
    kind = flow.types[mask]
    if not isinstance(kind, TensorType) or not batch_dims(kind):
        return 1
    return flow.outer(mask) * prod(number(size) for size in kind.shape[: batch_dims(kind)[0]])


def check_selection(op: Op, flow: Flow) -> None:
    """Raise Mixes if an op pairs rows of samples that are not the same ones in a micro-batch as in the batch."""
    if op.target is checked_places or (isinstance(op.target, Opaque) and op.target.keeps_samples):
        return
    batched = [name for name in dict.fromkeys(op.reads) if batch_dims(flow.types[name]) and name in flow.depends]
    if _finds_own(op, flow):
        batched.remove(op.args[0].name)
    mask = mask_of(op, flow.types)
    if mask is not None and op_name(op) in PUTS:
        value = op.args[2].name if len(op.args) > 2 and isinstance(op.args[2], Ref) else None
        if value in batched and batch_dims(flow.types[mask]):
            batched.remove(value)
            named = _named_by(_of_rows(mask, flow), flow)
            if named not in selected(flow.types[value]) or flow.outer(value) > 1:
                what = f"puts rows of {flow.types[value]} where a mask is true that has not selected them"
                in_order = _in_order(mask, value, flow)
                if not in_order or not _is_checked(mask, value, flow):
                    raise Mixes(op, what, in_order)
        elif op_name(op) == "masked_scatter" and batch_dims(flow.types[mask]):
            raise Mixes(op, "gives the next value to each place where a mask is true, whichever sample it is of")
    elif mask is not None and (new := selected(op.type) - selected(flow.types[mask])):
        flow.masks[flow.equal.get(mask, mask)] = next(iter(new))
        batched = [name for name in batched if selected(flow.types[name]) != new]  # beside the mask in an index
    elif op_name(op) == "ctc_loss" and _has_own_targets(op, flow):
        return
    if len({selected(flow.types[name]) for name in batched}) > 1:
        kinds = ", ".join(str(flow.types[name]) for name in batched)
        raise Mixes(op, f"pairs rows that data selects with others: {kinds}")


def _in_order(mask: str, value: str, flow: Flow) -> bool:
    """Whether the places where a mask is true, and the rows that are put there, are one sample's after another's."""
    return all(batch_dims(flow.types[name]) == (0,) and flow.outer(name) == 1 for name in (mask, value))


def _is_checked(mask: str, value: str, flow: Flow) -> bool:
    """Whether a run checks that there are as many places as rows."""
    made = flow.made.get(mask)
    return made is not None and made.target is checked_places and made.args[1] == Ref(value)


def _finds_own(op: Op, flow: Flow) -> bool:
    """Whether an op finds rows of its first argument by the numbers of their samples (`sample_numbers.py`)."""
    if op_name(op) not in ("getitem", "setitem", "index_put", "index_select", "index_add"):
        return False
    first = op.args[0].name if isinstance(op.args[0], Ref) else ""
    return first in flow.depends and any(ref.name in flow.places for ref in refs(op.args[1:3]))


def _named_by(mask: str, flow: Flow) -> str | None:
    """The name of how many rows a mask, or one that is equal to it, has selected."""
    return flow.masks.get(flow.equal.get(mask, mask))


def _of_rows(mask: str, flow: Flow) -> str:
    """The mask that this one is made of, if it only has the same truth for all elements of a row."""
    made, kind = flow.made.get(mask), flow.types[mask]
    while made is not None and op_name(made) in ("unsqueeze", "expand", "expand_as", "broadcast_to", "getitem"):
        first = flow.types.get(getattr(made.args[0], "name", ""))
        if not isinstance(first, TensorType) or not isinstance(kind, TensorType):
            break
        shape = first.shape[:-1] if first.shape[-1:] == (1,) else first.shape
        if kind.shape[: len(shape)] != shape or mask_of(made, flow.types) is not None:
            break
        mask = made.args[0].name
        made = flow.made.get(mask)
    return mask


def _has_own_targets(op: Op, flow: Flow) -> bool:
    """Whether the targets of a CTC loss are those that a mask selects, and their lengths what it selects of each
    sample."""
    given = {name: value.name for name, value in arguments(op).items() if isinstance(value, Ref)}
    lengths = flow.made.get(given.get("target_lengths", ""))
    while lengths is not None and op_name(lengths) in CASTS and isinstance(lengths.args[0], Ref):
        lengths = flow.made.get(lengths.args[0].name)
    targets = given.get("targets", "")
    if lengths is None or op_name(lengths) != "sum" or not isinstance(lengths.args[0], Ref):
        return False
    names, mask = selected(flow.types.get(targets, op.type)), lengths.args[0].name
    counts = isinstance(lengths.type, TensorType) and len(lengths.type.shape) == 1 and batch_dims(lengths.type) == (0,)
    return counts and _named_by(mask, flow) in names and flow.outer(targets) == 1
