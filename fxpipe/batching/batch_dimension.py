"""Whether a batch can be cut: follows the batch through the graph and finds what mixes its samples.

In every value the batch `b` must be one dimension, or the slowest part of one (`b*t` after a flatten), or absent:

    x            f32[b, 8]      batched
    x.mean(1)    f32[b]         batched
    x.t()        f32[8, b]      batched, along dimension 1
    x.mean(0)    f32[8]         pooled: fine as an output that is reduced, mixed where it meets batched values again
    x @ x.t()    f32[b, b]      mixed
    x.flip(0)    f32[b, 8]      mixed: the batch is there, but no sample stays in its place

Unknown ops pass if their result has the batch in one dimension. Statistics that go into a buffer, batch norm's or the
model's own, are those of each micro-batch.

An op can only mix samples of one micro-batch. Its results may still be outputs (`join_outputs.py`), with a warning
(`mixed_samples.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from math import prod
from typing import Any

from fxpipe.errors import CaptureError
from fxpipe.ir.graph.graph import Graph, Op, Ref, called, op_name, refs
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.ir.graph.ops import (
    ALONG,
    ARITHMETIC,
    BEHIND,
    LIKE,
    POINTWISE,
    RECURRENT,
    SIZES,
    SPLIT_OPS,
    WITHIN_LAST,
)
from fxpipe.ir.graph.value_types import BATCH, ScalarType, TensorType, ValueType, in_vmap, sized_by_data, tensors
from fxpipe.ir.once import once

from .batch_facts import Flow, Mixes, batch_dims, multiple, number, returns_what_it_writes
from .data_sizes import first_equal
from .op_errors import refuse
from .sample_numbers import COUNT, SHUFFLE, check_lookup, count, item_at, note_numbers
from .sample_order import check_meeting_rows, check_order, check_split, check_write, forget_alike, note_order
from .selected_rows import check_selection
from .sorted_rows import follow_sorted

# Ops that work element by element, also in a vmap.
PLACE_BY_PLACE = ARITHMETIC | POINTWISE | {"_add_batch_dim", "_remove_batch_dim"}
DEFAULT_DIMS = {"normalize": (1,), "rot90": (0, 1), "flipud": (0,), "fliplr": (1,), "msort": (0,)}
DEFAULT_DIMS |= {"fft_fft2": (-2, -1), "fft_ifft2": (-2, -1)}
ASKS = SIZES | {"getattr", "dim", "ndimension", "stride", "__get__"}  # ops that read only the sizes of a tensor


@once
def follow(graph: Graph) -> Flow:
    """What is known about every value of the graph."""
    selects = any(sized_by_data(op.type) for op in graph.ops)
    flow = Flow(graph.types, {op.name: op for op in graph.ops}, first_equal(graph) if selects else {})
    flow.depends |= {item.name for item in graph.inputs if item.batch_dim is not None}
    states, meant = {state.name for state in graph.states}, {name for name, _ in graph.parts}
    for op in graph.ops:
        if not flow.depends:
            break
        _follow(op, flow)
        if op.name in meant:
            flow.mixed.pop(op.name, None)
        written = set(op.writes)
        for name in written - {op.name}:
            flow.places.pop(name, None)
            flow.masks.pop(name, None)
        forget_alike(written, flow)
        if op.name in flow.counted:
            flow.counted |= dict.fromkeys(written - states, flow.counted[op.name])
        if written and not written - states and returns_what_it_writes(op):
            for known in (flow.depends, flow.pooled, flow.counted, flow.mixed, flow.scaled, flow.sorted):
                known.discard(op.name) if isinstance(known, set) else known.pop(op.name, None)
        elif written and op.name in flow.depends:  # values with the same memory now have the same facts
            flow.depends |= written - states
            if op.name in flow.pooled:
                flow.pooled |= dict.fromkeys(written - states, flow.pooled[op.name])
            if op.name in flow.mixed:
                flow.mixed |= dict.fromkeys(written - states, flow.mixed[op.name])
            for name in written - states:
                flow.sorted.pop(name, None)
                if op.name in flow.sorted:
                    flow.sorted[name] = flow.sorted[op.name]
    return flow


def _follow(op: Op, flow: Flow) -> None:
    """Record the facts about the result of one op."""
    dims = batch_dims(op.type)
    kind_only = tuple(refs(op.args[:1])) if called(op) in LIKE and not op.random and not dims else ()
    reads = [name for name in op.reads if name in flow.depends and not (kind_only and Ref(name) in kind_only)]
    asks = called(op) in ASKS and not any(tensors(op.type))
    if asks or (isinstance(op.type, ScalarType) and flow.sizes & set(op.reads)):
        flow.sizes.add(op.name)
        return
    if not reads:
        if dims and called(op) in COUNT | SHUFFLE:
            flow.counted[op.name] = op
        _check(op, flow, (count,))
        note_order(op, flow)
        if dims and op.name not in flow.mixed:
            try:
                for check in CHECKS:
                    check(op, flow)
            except CaptureError:  # rows meet, as in `ones(b).cumsum(0)`
                flow.counted.setdefault(op.name, op)
            note_numbers(op, flow)
        return
    flow.depends.add(op.name)
    _check(op, flow, CHECKS)
    _note_scale(op, flow)
    note_order(op, flow)
    if dims:
        return
    if any(True for _ in tensors(op.type)) or isinstance(op.type, ScalarType) or flow.pooled.keys() >= set(reads):
        flow.pooled[op.name] = next((flow.pooled[name] for name in reads if name in flow.pooled), op)


def _check(op: Op, flow: Flow, checks: Sequence[Callable[[Op, Flow], None]]) -> None:
    """Record in `flow.mixed` if the op mixes samples, or reads a mixed value."""
    met = next((flow.mixed[name] for name in op.reads if name in flow.mixed), None)
    if met is not None:
        flow.mixed[op.name] = met
        return
    try:
        for check in () if follow_sorted(op, flow) else checks:
            check(op, flow)
    except CaptureError as error:
        flow.mixed[op.name] = error.with_traceback(None)  # whose frames would keep all of this
        flow.counted.pop(op.name, None)


def _check_shape(op: Op, flow: Flow) -> None:
    for kind in tensors(op.type):
        if len(batch_dims(kind)) > 1:
            raise Mixes(op, f"makes {kind}, in which every sample meets every other")
        for dim in batch_dims(kind):
            if multiple(kind.shape[dim]) is None:
                raise Mixes(op, f"takes a part of the batch: {kind}")


def _check_dimension(op: Op, flow: Flow) -> None:
    """Raise Mixes if an op that runs over a dimension runs over that of the batch."""
    name = called(op).rstrip("_")
    kind = flow.types.get(op.first)
    if not isinstance(kind, TensorType) or not batch_dims(kind):
        return
    batch = batch_dims(kind)[0]
    if name in ALONG:
        if batch in [dim % len(kind.shape) for dim in _along(op, name, len(kind.shape))]:
            raise Mixes(op, f"{name} runs along the batch, dimension {batch} of {kind}")
    elif batch in _mixed_dims(op, name, len(kind.shape), flow):
        raise Mixes(op, f"{name} runs over dimension {batch} of {kind}, which is the batch")
    elif name == "getitem" and isinstance(item_at(op.args[1], batch, kind, flow), Ref):
        return  # each is looked up by its number, or selected
    elif name in SPLIT_OPS or name in ("getitem", "narrow", "select"):
        check_split(op, kind, batch, flow)
    elif name == "squeeze" and len(op.args) == 1 and not op.kwargs and len(kind.shape) > 1:
        raise refuse(
            op, "squeeze without a dimension also takes away a batch of one", "name the dimension, as in x.squeeze(1)"
        )


def _along(op: Op, name: str, rank: int) -> Iterable[int]:
    """The dimensions that an op of `ALONG` runs along; torch's default if none are given."""
    position, key = ALONG[name]
    given = op.args[position] if len(op.args) > position else op.kwargs.get(key)
    if key == "dims" and isinstance(given, int):
        given = op.args[position:]  # x.flip(0, 1)
    if given is not None:
        return _ints(given)
    if name in ("roll", "fft_fftn", "fft_ifftn", "gradient"):
        return range(rank)
    if name in ("softmax", "log_softmax", "softmin"):
        return (0,) if rank in (1, 3) else (1,)
    return DEFAULT_DIMS.get(name, (-1,))


def _mixed_dims(op: Op, name: str, rank: int, flow: Flow) -> Collection[int]:
    """The dimensions of the first argument that an op mixes."""
    if name in BEHIND:
        groups = [argument(op, 6, "groups"), argument(op, 7, "groups"), argument(op, 1, "num_groups")]
        alone = any(isinstance(one, Ref) and one.name in flow.sizes for one in groups)  # each sample has its own groups
        return () if alone else range(BEHIND[name], rank)
    if name == "as_strided":
        return () if _keeps_stride(op, flow) else range(rank)
    if name == "renorm":
        dim = argument(op, 2, "dim")
        return [other for other in range(rank) if other != dim % rank]
    if name == "multi_head_attention_forward":
        return (0, 2) if rank == 3 else range(rank)
    if name in ("layer_norm", "rms_norm"):
        shape = argument(op, 1, "normalized_shape")
        return range(rank - (len(shape) if isinstance(shape, (tuple, list)) else 1), rank)
    return range(rank - WITHIN_LAST.get(name, 0), rank)


def _keeps_stride(op: Op, flow: Flow) -> bool:
    """Whether an `as_strided` goes from sample to sample as its argument does, as far as that is known."""
    kind, strides, dims = flow.types[op.args[0].name], argument(op, 2, "stride"), batch_dims(op.type)
    if not isinstance(kind, TensorType) or not isinstance(strides, (tuple, list)) or len(dims) != 1:
        return False
    step = strides[dims[0]]
    return not isinstance(step, int) or step == prod(number(size) for size in kind.shape[batch_dims(kind)[0] + 1 :])


def _check_terms(op: Op, flow: Flow) -> None:
    """Raise Mixes if an einsum sums over the samples of one operand, and keeps those of another."""
    terms = op.args[0] if op_name(op) == "einsum" and op.args and isinstance(op.args[0], str) else ""
    if "->" not in terms or "." in terms or not batch_dims(op.type):
        return
    letters = ["".join(term.split()) for term in terms.partition("->")[0].split(",")]
    operands = list(refs(op.args[1:]))
    if len(letters) == len(operands):
        pairs = [(term, batch_dims(flow.types[one.name])) for term, one in zip(letters, operands, strict=True)]
        if len({term[dims[0]] for term, dims in pairs if dims}) > 1:
            raise Mixes(op, f"sums over samples in {terms!r}")


def _check_time(op: Op, flow: Flow) -> None:
    """Raise Mixes if a recurrent network takes the batch for its steps. Its arguments: (input, state, parameters,
    biases, layers, dropout, train, bidirectional, batch first)."""
    if called(op) not in RECURRENT or len(op.args) < 9:
        return
    kind = flow.types.get(op.first)
    dims = batch_dims(kind) if isinstance(kind, TensorType) else ()
    if dims and dims[0] != (0 if op.args[8] is True else 1):
        raise Mixes(op, f"{called(op)} takes dimension {dims[0]} of {kind}, the batch, for its steps")


def _check_vmap(op: Op, flow: Flow) -> None:
    """Raise Mixes if a vmap may mix samples. In a vmap over the batch, values are of one sample. In a vmap over another
    dimension, it is not known where the batch is: only elementwise ops are allowed, and the type of the result shows
    whether samples were mixed."""
    reads = [name for name in op.reads if name in flow.depends]
    if not in_vmap(op.type) or flow.pooled.keys() >= set(reads):
        return
    entered: set[str] = set()
    beside: list[Op] = []
    for name in reads:
        kind = flow.types[name]
        if name in flow.pooled:
            raise Mixes(flow.pooled[name], f"pools the batch into {kind}, which {op.origin} uses for single samples")
        if isinstance(kind, TensorType):
            if called(op) == "_add_batch_dim" and op.args[1] % len(kind.shape) in batch_dims(kind):
                entered.add(op.args[2].name)
            elif called(op) == "each_sample" and op.args[1] in batch_dims(kind) and kind.shape[op.args[1]] == BATCH:
                entered.add(called(op))
            elif called(op) == "_add_batch_dim" and all(kind.shape[dim] == BATCH for dim in batch_dims(kind)):
                beside.append(op)
            else:
                raise _whole_in_vmap(op, kind)
        elif name in flow.beside:
            beside.append(flow.beside[name])
        elif name in flow.vmaps:
            entered.add(flow.vmaps[name])
    if len(entered) > 1:
        raise Mixes(op, "is in two vmaps over the batch, so that every sample meets every other")
    if beside and (entered or op.random or op_name(op) not in PLACE_BY_PLACE):
        raise _whole_in_vmap(beside[0], flow.types[beside[0].reads[0]])
    if beside:
        flow.beside[op.name] = beside[0]
    if entered:
        flow.vmaps[op.name] = entered.pop()


def _whole_in_vmap(op: Op, kind: ValueType) -> Mixes:
    return Mixes(op, f"takes the whole batch, {kind}, into a vmap")


def _check_meeting(op: Op, flow: Flow) -> None:
    """Raise Mixes if a value that was pooled over the batch is used for single samples."""
    if not batch_dims(op.type):
        return
    met = next((flow.pooled[name] for name in op.reads if name in flow.pooled), None)
    if met is not None:
        raise Mixes(met, f"pools the batch into {met.type}, which {op.origin or op.name} uses for single samples")


def _check_opaque(op: Op, flow: Flow) -> None:
    """Raise Mixes if the op is a result of a submodule that is kept whole, of which runs have shown that it depends on
    other samples."""
    made, result = op, 0
    if op_name(op) == "getitem" and isinstance(op.args[0], Ref) and isinstance(op.args[1], int):
        made, result = flow.made.get(op.args[0].name, op), op.args[1]
    mixing = made.target.mixing if isinstance(made.target, Opaque) else ()
    if result in mixing and isinstance(op.type, TensorType) and batch_dims(op.type):
        what = "returns for a sample depends on other samples, as two runs show"
        raise Mixes(made, f"what {made.target}, kept whole, {what}")


CHECKS = (
    count,
    _check_opaque,
    _check_shape,
    check_order,
    _check_dimension,
    _check_terms,
    check_lookup,
    check_write,
    _check_time,
    _check_vmap,
    _check_meeting,
    check_selection,
    check_meeting_rows,
)


def _note_scale(op: Op, flow: Flow) -> None:
    """Record in `flow.scaled` if samples are computed with the batch size, which differs in a micro-batch."""
    if not batch_dims(op.type) and not in_vmap(op.type):
        return
    sizes = [name for name in op.reads if isinstance(flow.types[name], ScalarType) and name in flow.sizes]
    if sizes and op_name(op) in ARITHMETIC:
        flow.scaled[op.name] = Mixes(op, "computes with the batch size, which is another one in a micro-batch")
    elif met := next((flow.scaled[name] for name in op.reads if name in flow.scaled), None):
        flow.scaled[op.name] = met


def _ints(given: Any) -> tuple[int, ...]:
    items = given if isinstance(given, (tuple, list)) else (given,)
    return tuple(item for item in items if isinstance(item, int))
