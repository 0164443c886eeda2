"""Scaled dot product attention: a part has some of the samples and heads, and some of the queries unless a query's
place decides which keys it sees. It reads all keys and values of those."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fxpipe.ir.arguments import argument
from fxpipe.ir.graph import Op, Ref
from fxpipe.ir.strategy import Region
from fxpipe.passes.sharding.building import Building, Part
from fxpipe.passes.sharding.regions import Places, full
from fxpipe.passes.sharding.rule import Rule, aligned, each, with_arguments

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _cuts(b: Building, op: Op) -> Iterable[int]:
    """Samples, heads and queries; heads that share keys are not cut."""
    rank = len(b.shape(op.name))
    alike = all(b.shape(argument(op, at, NAMES[at]).name)[:-2] == b.shape(op.name)[:-2] for at in range(3))
    outer = range(rank - 2) if alike else (0,) if _same_samples(b, op) else ()
    return (*outer, *(() if argument(op, 5, "is_causal", False) else (rank - 2,)))


def _same_samples(b: Building, op: Op) -> bool:
    return all(b.shape(argument(op, at, NAMES[at]).name)[0] == b.shape(op.name)[0] for at in range(3))


def _make(b: Building, op: Op, places: Places) -> tuple[Part, ...]:
    query, key, value, mask = (argument(op, at, NAMES[at]) for at in range(4))

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
        return op.target, *with_arguments(op, changed, NAMES)

    return each(b, op, places, call)


ATTENTION = {"scaled_dot_product_attention": Rule(_make, _cuts)}
