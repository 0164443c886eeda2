"""torch's own layer of attention, from its inputs to its result. It is cut by sample, which is its second dimension;
the weights of attention, where they are wanted, have the samples first."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from fxpipe.ir.graph import Op, Ref
from fxpipe.ir.types import TensorType, TupleType
from fxpipe.passes.sharding.building import Building, Part
from fxpipe.passes.sharding.regions import Place, Places, Range, extent, full
from fxpipe.passes.sharding.rule import Rule, items, with_arguments

NAMES = list(inspect.signature(F.multi_head_attention_forward).parameters)
SAMPLES = {"query": 1, "key": 1, "value": 1, "key_padding_mask": 0}  # what is read of them, and where they are in it
MADE = (1, 0)  # and what is made


def _given(op: Op) -> dict[str, Any]:
    return dict(zip(NAMES, op.args, strict=False)) | dict(op.kwargs)


def _cuts(b: Building, op: Op) -> Iterable[int]:
    """Samples, unless each has a mask of its own."""
    given = _given(op)
    mask = given.get("attn_mask")
    masked = isinstance(mask, Ref) and len(b.shape(mask.name)) > 2
    return () if masked or len(b.shape(given["query"].name)) < 3 else (1,)


def _make(b: Building, op: Op, places: Places) -> tuple[Part, ...]:
    names = b.part_names(op, places)
    return tuple(_part(b, op, name, place) for name, place in zip(names, places, strict=True))


def _part(b: Building, op: Op, name: str, place: Place) -> Part:
    samples, changed = place.region[1], {}
    for key, one in _given(op).items():
        if isinstance(one, Ref) and one.name not in b.numbers:
            region = list(full(b.shape(one.name)))
            if key in SAMPLES:
                region[SAMPLES[key]] = samples
            changed[key] = Ref(b.gather(op, one.name, tuple(region), place.device))
    args, kwargs = b.literal(with_arguments(op, changed, NAMES))
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


MULTI_HEAD = {"multi_head_attention_forward": Rule(_make, _cuts)}
