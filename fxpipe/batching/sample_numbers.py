"""Numbers of the samples, which find each sample's own rows, and must not find another's.

i = arange(b)                   each sample's number
x[i, last]                      a row of each sample
x.view(b*t, 8)[i*t + last]      the same
i, j = where(mask)              the numbers of those that a mask selects
x[(i + 1) % b]                  the row of another sample: mixed
return i                        refused: a micro-batch counts its samples from 0
table[i], eye(b), table[:b]     the same: another row for each sample
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxpipe.ir.graph.graph import Op, Ref, called, op_name, refs
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.ops import ADD, CASTS, INDEXING, LOOKUP, MULTIPLY, RESHAPES
from fxpipe.ir.graph.value_types import ScalarType, TensorType, in_vmap

from .batch_facts import CONSTANTS, EXPANDS, REPEATS, Flow, Mixes, Places, batch_dims, multiple, number
from .data_sizes import mask_of
from .selected_rows import selected

COUNT = {"arange", "linspace"}
SHUFFLE = {"randperm"}
LISTS = {"nonzero", "argwhere", "where"}
MODULO = {"mod", "remainder", "fmod"}
# Ops that make a dimension for the batch, with the same for all samples.
SPREADS = EXPANDS | REPEATS | {"repeat_interleave", "stacked", "_remove_batch_dim"}
FILLS = {"full": 1, "full_like": 1, "new_full": 2}  # the position of the number that a tensor is filled with
KEEPS = RESHAPES | CASTS | EXPANDS | {"repeat_interleave", "clone", "detach"}


def count(op: Op, flow: Flow) -> None:
    """Values made of the numbers of samples are numbers too, unless these only find each sample's own rows. Raises
    Mixes if a random order is used as an index."""
    if (places := _places(op, flow)) is not None:
        flow.places[op.name] = places
    listed = _listed(op, flow)
    if places is not None or (listed is not None and listed.samples):
        flow.counted.setdefault(op.name, op)
    if listed is not None or _within_sample(op, flow):
        return
    used = _used(op, flow)
    if op_name(op) in INDEXING:
        order = next((o for name in op.reads if (o := flow.counted.get(name)) and called(o) in SHUFFLE), None)
        if order is not None:
            raise Mixes(op, "changes the order of the batch")
    found = next((flow.counted[name] for name in used if name in flow.counted), None)
    if found is not None and (batch_dims(op.type) or in_vmap(op.type)):
        flow.counted.setdefault(op.name, found)


def note_numbers(op: Op, flow: Flow) -> None:
    """Values without samples that have other rows for one sample than for another are their numbers, too."""
    if op.name not in flow.counted and op.name not in flow.drawn and not _same_for_all(op, flow):
        flow.counted[op.name] = op


def _same_for_all(op: Op, flow: Flow) -> bool:
    """Whether an op without samples, of which no check says that rows meet, makes the same of each."""
    name = op_name(op)
    if name in CONSTANTS:
        return not any(ref.name in flow.sizes for ref in refs(argument(op, FILLS.get(name, 9), "fill_value")))
    return name in SPREADS or any(batch_dims(flow.types[read]) for read in op.reads)


def _used(op: Op, flow: Flow) -> list[str]:
    """The values that an op reads, but for the numbers by which it finds each sample's own rows."""
    own: Ref | None = None
    first = op.args[0] if op.args else None
    kind = flow.types.get(first.name) if isinstance(first, Ref) else None
    if isinstance(kind, TensorType) and (dims := batch_dims(kind)):
        if op_name(op) in ("getitem", "setitem", "index_put"):
            found = item_at(op.args[1], dims[0], kind, flow)
        else:
            along = argument(op, 1, "dim") if op_name(op) in ("index_select", "index_add") else None
            found = argument(op, 2, "index") if type(along) is int and along % len(kind.shape) == dims[0] else None
        own = found if isinstance(found, Ref) and finds_own(found, kind, dims[0], flow) else None
    return [ref.name for ref in refs((op.args, op.kwargs)) if ref != own]


def _within_sample(op: Op, flow: Flow) -> bool:
    """Whether an op makes the place in each sample of the places in all: `arange(b*t) % t`."""
    first = op.args[0] if op.args else None
    places = flow.places.get(first.name) if isinstance(first, Ref) else None
    times = _factor(op.args[1], flow) if places is not None and len(op.args) == 2 else None
    return op_name(op) in MODULO and places is not None and times is not None and places.each % times == 0


def _places(op: Op, flow: Flow) -> Places | None:
    """The samples that an op's result finds, if it finds each one's own rows."""
    name, first = op_name(op), op.args[0] if op.args else None
    if name == "arange" and batch_dims(op.type):
        return _all(op, flow)
    if (listed := _listed(op, flow)) is not None:
        return listed.places
    other = op.args[1] if len(op.args) > 1 else None
    if name in MULTIPLY | ADD and isinstance(other, Ref) and other.name in flow.places:
        first, other = other, first
    if not isinstance(first, Ref) or first.name not in flow.places:
        return None
    places = flow.places[first.name]
    if name in KEEPS or (name == "getitem" and _takes_all(other)):
        return places
    times = _factor(other, flow)
    if name in MULTIPLY and times:
        return Places(places.each * times, places.of)
    floors = name in ("floordiv", "floor_divide") or (name == "div" and op.kwargs.get("rounding_mode") == "floor")
    if floors and times and places.each % times == 0:
        return Places(places.each // times, places.of)
    if name not in ADD or "sub" in name or op.kwargs or places.each == 1:
        return None
    if isinstance(other, Ref):
        far = other.name in flow.counted or other.name in flow.sizes
    else:
        far = type(other) is not int or other < 0
    return None if far else places  # another row of the same sample


def _all(op: Op, flow: Flow) -> Places | None:
    """0, 1, 2 and so on, or multiples of these, up to what the batch has of something."""
    start, step = (op.args[0] if len(op.args) > 1 else 0), (op.args[2] if len(op.args) > 2 else 1)
    kind, times = op.type, _factor(step, flow)
    each = multiple(kind.shape[0]) if isinstance(kind, TensorType) else None
    plain = start == 0 and type(start) is int and not op.kwargs.keys() & {"start", "step", "end"}
    return Places(each * times, selected(kind)) if plain and each and times else None


@dataclass(frozen=True)
class Listed:
    """What an op has of the places where a mask is true. `samples`: whether numbers of samples are among it; `places`:
    these alone."""

    samples: bool
    places: Places | None = None


def _listed(op: Op, flow: Flow) -> Listed | None:
    """What an op makes that lists the places where a mask is true, or takes one dimension of such a list."""
    made, item = op, None
    if op_name(op) == "getitem" and isinstance(op.args[0], Ref) and op.args[0].name in flow.made:
        made, item = flow.made[op.args[0].name], op.args[1]
        if isinstance(item, tuple) and len(item) == 2 and item[0] == slice(None):
            item = item[1]
    mask = mask_of(made, flow.types) if op_name(made) in LISTS else None
    kind = flow.types[mask] if mask is not None else None
    if not isinstance(kind, TensorType) or not batch_dims(kind) or isinstance(made.type, ScalarType):
        return None
    batch = batch_dims(kind)[0]
    item = 0 if made is op and len(kind.shape) == 1 and isinstance(made.type, TensorType) else item
    if type(item) is not int:
        return Listed(True)
    each = multiple(kind.shape[batch])
    return Listed(True, Places(each, selected(kind)) if each else None) if item == batch else Listed(False)


def _takes_all(index: Any) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(not isinstance(item, Ref) and (item is None or item is ... or item == slice(None)) for item in items)


def _factor(value: Any, flow: Flow) -> int | None:
    """A positive whole number, or a size that is not of the batch, as a number."""
    if isinstance(value, Ref):
        return None if value.name in flow.sizes or value.name in flow.made else number(value.name)
    return value if type(value) is int and value > 0 else None


def check_lookup(op: Op, flow: Flow) -> None:
    """Raise Mixes if samples are indexed by numbers that may be positions in the whole batch."""
    name = called(op).rstrip("_")
    looked = op.args[1] if name == "embedding" and len(op.args) > 1 else next(iter(op.args), None)
    kind = flow.types.get(looked.name) if isinstance(looked, Ref) else None
    if not isinstance(kind, TensorType) or not batch_dims(kind):
        return
    batch = batch_dims(kind)[0]
    if name in LOOKUP:
        position = LOOKUP[name]
        dim = op.args[position] if len(op.args) > position else op.kwargs.get("dim")
        found = not isinstance(dim, int) or dim % len(kind.shape) == batch
        if found and name in ("index_select", "index_add") and len(op.args) > 2 and isinstance(op.args[2], Ref):
            found = not finds_own(op.args[2], kind, batch, flow)
    elif name in ("getitem", "setitem", "index_put"):
        index = item_at(op.args[1], batch, kind, flow)
        of = flow.types.get(index.name) if isinstance(index, Ref) else None
        if isinstance(of, TensorType):
            found = index.name in flow.counted if of.dtype == "bool" else not finds_own(index, kind, batch, flow)
        else:
            found = False
    else:
        found = name in ("embedding", "take", "put") and (batch == 0 or name != "embedding")
    if found:
        raise Mixes(op, f"looks samples up by their number in the batch, dimension {batch} of {kind}")


def finds_own(index: Ref, kind: TensorType, batch: int, flow: Flow) -> bool:
    """Whether an index finds for each sample rows of its own along the batch."""
    return flow.places.get(index.name) == Places(multiple(kind.shape[batch]) or 0, selected(kind))


def item_at(index: Any, dim: int, of: TensorType, flow: Flow) -> Any:
    """The item of an index of such a tensor that applies to dimension `dim`; None if that is taken whole."""
    items = list(index) if isinstance(index, (tuple, list)) else [index]
    takes = []
    for item in items:
        kind = flow.types.get(item.name) if isinstance(item, Ref) else None
        masked = len(kind.shape) if isinstance(kind, TensorType) and kind.dtype == "bool" else None
        takes.append(int(item is not None and item is not ...) if masked is None else masked)
    before = 0
    for item, many in zip(items, takes, strict=True):
        if item is ...:
            before += len(of.shape) - sum(takes)
        elif before <= dim < before + many:
            return item
        else:
            before += many
        if before > dim:
            return None
    return None
