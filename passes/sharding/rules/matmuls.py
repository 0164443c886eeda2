"""Products of matrices: a part has its own rows and columns, and reads all of the dimension that is summed over. The
output channels of a linear layer are rows of its weight.

Scaled dot product attention: a part has some of the samples and heads, and some of the queries unless the attention is
causal. It reads all keys and values of its samples and heads. torch's `multi_head_attention_forward` is cut by sample:
dimension 1 of its inputs and result, dimension 0 of the attention weights, if they are returned.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F

from fxpipe.ir.graph.graph import Op, Ref, refs
from fxpipe.ir.graph.op_arguments import argument, by_name
from fxpipe.ir.graph.value_types import TensorType, TupleType
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Place, Places, Range, extent, full
from fxpipe.passes.sharding.sharding_rule import (
    Called,
    Rule,
    aligned,
    by_place,
    each,
    every,
    items,
    reading,
    with_arguments,
)


def _linear(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    inside = (0, b.shape(argument(op, 0, "input").name)[-1])

    def regions(region: Region) -> dict[str, Region]:
        *rows, columns = region
        return {"input": (*rows, inside), "weight": (columns, inside), "bias": (columns,)}

    return reading(b, op, places, ("input", "weight", "bias"), regions)


def _partial_linear(b: GraphRewriter, op: Op, place: Place, inside: Range) -> Called:
    """The channels `inside` of the input; the first of these parts adds the bias."""
    names, (*rows, columns) = ("input", "weight", "bias"), place.region
    given = by_name(op, names)
    wanted: dict[str, Region] = {"input": (*rows, inside), "weight": (columns, inside)}
    if inside[0] == 0:
        wanted["bias"] = (columns,)
    read = {name: b.read(op, given[name], of, place.device) for name, of in wanted.items() if given.get(name)}
    return op.target, (), read


def _matmul(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    inside = (0, b.shape(next(refs((op.args, dict(op.kwargs)))).name)[-1])
    return each(b, op, places, lambda region, device: _partial_matmul(b, op, Place(region, device), inside))


def _partial_matmul(b: GraphRewriter, op: Op, place: Place, inside: Range) -> Called:
    """As torch.matmul: matrices are in the last two dimensions, the others broadcast; a vector has one dimension."""
    x, y = refs((op.args, dict(op.kwargs)))
    first, second, region = b.shape(x.name), b.shape(y.name), place.region
    *batch, last = region if len(second) > 1 else (*region, (0, 1))
    *batch, row = batch if len(first) > 1 else (*batch, (0, 1))
    left: Region = (row, inside) if len(first) > 1 else (inside,)
    right: Region = (inside, last) if len(second) > 1 else (inside,)
    left = (*aligned(tuple(batch), first[:-2]), *left)
    right = (*aligned(tuple(batch), second[:-2]), *right)
    return op.target, (b.read(op, x, left, place.device), b.read(op, y, right, place.device)), {}


def _rows(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Any dimension of the result; not the channels if `max_norm` or `sparse` need whole rows; none if the gradient
    depends on how often an index occurs."""
    rank = len(b.shape(op.name))
    if op.target is not F.embedding or argument(op, 5, "scale_grad_by_freq", False) or op.writes:
        return ()
    whole = argument(op, 3, "max_norm") is not None or argument(op, 6, "sparse", False)
    return range(rank - 1 if whole else rank)


def _embedding(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    rows = (0, b.shape(argument(op, 1, "weight").name)[0])
    regions = lambda region: {"input": region[:-1], "weight": (rows, region[-1])}  # noqa: E731
    return reading(b, op, places, ("input", "weight"), regions)


MATMULS = {
    "linear": Rule(_linear, every, partial=_partial_linear),
    **dict.fromkeys(("matmul", "bmm"), Rule(_matmul, every, partial=_partial_matmul)),
    "embedding": Rule(_embedding, _rows),
}

# Attention ------------------------------------------------------------------------------------------------------------

ATTENTION_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _attention_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Samples, heads and queries; heads that share keys are not cut."""
    shape = b.shape(op.name)
    read = [b.shape(argument(op, at, ATTENTION_NAMES[at]).name) for at in range(3)]
    alike = all(one[:-2] == shape[:-2] for one in read)
    outer = range(len(shape) - 2) if alike else (0,) if all(one[0] == shape[0] for one in read) else ()
    return (*outer, *(() if argument(op, 5, "is_causal", False) else (len(shape) - 2,)))


def _attention(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    query, key, value, mask = (argument(op, at, ATTENTION_NAMES[at]) for at in range(4))

    def regions(region: Region) -> dict[str, Region]:
        *batch, rows, _ = region

        def whole(one: Ref) -> Region:
            shape = b.shape(one.name)
            outer = batch if shape[:-2] == b.shape(op.name)[:-2] else (region[0], *full(shape[1:-2]))
            return (*outer, *full(shape[-2:]))

        queries = whole(query)
        found = {"query": (*queries[:-2], rows, queries[-1]), "key": whole(key), "value": whole(value)}
        seen = (*batch, rows, (0, b.shape(key.name)[-2]))
        return found if mask is None else {**found, "attn_mask": aligned(seen, b.shape(mask.name))}

    return reading(b, op, places, ATTENTION_NAMES, regions)


MULTI_HEAD_NAMES = list(inspect.signature(F.multi_head_attention_forward).parameters)
SAMPLES = {"query": 1, "key": 1, "value": 1, "key_padding_mask": 0}  # the dimension of the samples in each argument
MADE = (1, 0)  # the same in each result


def _multi_head_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Samples, unless each has a mask of its own."""
    given = by_name(op, MULTI_HEAD_NAMES)
    mask = given.get("attn_mask")
    masked = isinstance(mask, Ref) and len(b.shape(mask.name)) > 2
    return () if masked or len(b.shape(given["query"].name)) < 3 else (1,)


def _multi_head(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    return by_place(b, op, places, partial(_multi_head_part, b, op))


def _multi_head_part(b: GraphRewriter, op: Op, name: str, place: Place) -> Part:
    samples, changed = place.region[1], {}
    for key, one in by_name(op, MULTI_HEAD_NAMES).items():
        if isinstance(one, Ref) and one.name not in b.numbers:
            region = list(full(b.shape(one.name)))
            if key in SAMPLES:
                region[SAMPLES[key]] = samples
            changed[key] = b.read(op, one, tuple(region), place.device)
    args, kwargs = b.literal(with_arguments(op, changed, MULTI_HEAD_NAMES))
    type = b.captured[op.name]
    assert isinstance(type, TupleType)
    type = TupleType(tuple(_of(item, at, samples) for item, at in zip(type.items, MADE, strict=True)))
    b.add(op, name, place.device, op.target, args, kwargs, type=type, random=op.random)
    result, weights = items(b, op, name, place.device)
    assert result is not None
    own = (replace(result, region=place.region), weights and replace(weights, region=(samples, *weights.region[1:])))
    return Part(name, place.region, place.device, own)


def _of(item: Any, at: int, samples: Range) -> Any:
    """The type of a range of samples of `item`, whose dimension `at` is that of the samples."""
    if not isinstance(item, TensorType):
        return item
    return replace(item, shape=(*item.shape[:at], *extent((samples,)), *item.shape[at + 1 :]))


ATTENTION = {
    "scaled_dot_product_attention": Rule(_attention, _attention_cuts),
    "multi_head_attention_forward": Rule(_multi_head, _multi_head_cuts),
}
