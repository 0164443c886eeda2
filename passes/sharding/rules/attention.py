"""Scaled dot product attention: a part has some of the samples and heads, and some of the queries unless a query's
place decides which keys it sees. It reads all keys and values of those.

torch's own layer of attention, from its inputs to its result, is cut by sample, which is its second dimension; the
weights of attention, where they are wanted, have the samples first.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from fxpipe.ir.graph.graph import Op, Ref
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.value_types import TensorType, TupleType
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Place, Places, Range, extent, full
from fxpipe.passes.sharding.sharding_rule import Rule, aligned, each, items, with_arguments

ATTENTION_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _attention_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Samples, heads and queries; heads that share keys are not cut."""
    rank = len(b.shape(op.name))
    alike = all(b.shape(argument(op, at, ATTENTION_NAMES[at]).name)[:-2] == b.shape(op.name)[:-2] for at in range(3))
    outer = range(rank - 2) if alike else (0,) if _same_samples(b, op) else ()
    return (*outer, *(() if argument(op, 5, "is_causal", False) else (rank - 2,)))


def _same_samples(b: GraphRewriter, op: Op) -> bool:
    return all(b.shape(argument(op, at, ATTENTION_NAMES[at]).name)[0] == b.shape(op.name)[0] for at in range(3))


def _attention(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    query, key, value, mask = (argument(op, at, ATTENTION_NAMES[at]) for at in range(4))

    def read(one: Ref, region: Region, device: int) -> Ref:
        return Ref(b.gather(op, one.name, region, device))

    def call(region: Region, device: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        *batch, rows, _ = region

        def whole(one: Ref) -> Region:
            shape = b.shape(one.name)
            outer = batch if shape[:-2] == b.shape(op.name)[:-2] else (region[0], *full(shape[1:-2]))
            return (*outer, *full(shape[-2:]))

        queries = whole(query)
        changed = {
            "query": read(query, (*queries[:-2], rows, queries[-1]), device),
            "key": read(key, whole(key), device),
            "value": read(value, whole(value), device),
        }
        if mask is not None:
            seen = (*batch, rows, (0, b.shape(key.name)[-2]))
            changed["attn_mask"] = read(mask, aligned(seen, b.shape(mask.name)), device)
        return op.target, *with_arguments(op, changed, ATTENTION_NAMES)

    return each(b, op, places, call)


MULTI_HEAD_NAMES = list(inspect.signature(F.multi_head_attention_forward).parameters)
SAMPLES = {"query": 1, "key": 1, "value": 1, "key_padding_mask": 0}  # what is read of them, and where they are in it
MADE = (1, 0)  # and what is made


def _given(op: Op) -> dict[str, Any]:
    return dict(zip(MULTI_HEAD_NAMES, op.args, strict=False)) | dict(op.kwargs)


def _multi_head_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Samples, unless each has a mask of its own."""
    given = _given(op)
    mask = given.get("attn_mask")
    masked = isinstance(mask, Ref) and len(b.shape(mask.name)) > 2
    return () if masked or len(b.shape(given["query"].name)) < 3 else (1,)


def _multi_head(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    names = b.part_names(op, places)
    return tuple(_multi_head_part(b, op, name, place) for name, place in zip(names, places, strict=True))


def _multi_head_part(b: GraphRewriter, op: Op, name: str, place: Place) -> Part:
    samples, changed = place.region[1], {}
    for key, one in _given(op).items():
        if isinstance(one, Ref) and one.name not in b.numbers:
            region = list(full(b.shape(one.name)))
            if key in SAMPLES:
                region[SAMPLES[key]] = samples
            changed[key] = Ref(b.gather(op, one.name, tuple(region), place.device))
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
    """The type of some samples of this, where they are in dimension `at`."""
    if not isinstance(item, TensorType):
        return item
    return replace(item, shape=(*item.shape[:at], *extent((samples,)), *item.shape[at + 1 :]))


ATTENTION = {
    "scaled_dot_product_attention": Rule(_attention, _attention_cuts),
    "multi_head_attention_forward": Rule(_multi_head, _multi_head_cuts),
}
