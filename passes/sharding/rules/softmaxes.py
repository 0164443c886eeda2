"""Softmax: any dimension may be cut but the one that it is over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fxpipe.ir.arguments import argument
from fxpipe.ir.graph import Op, Ref
from fxpipe.ir.strategy import Region
from fxpipe.passes.sharding.building import Building, Part
from fxpipe.passes.sharding.regions import Places
from fxpipe.passes.sharding.rule import Rule, each


def _cuts(b: Building, op: Op) -> Iterable[int]:
    over, rank = argument(op, 1, "dim"), len(b.shape(op.name))
    return () if over is None else (dim for dim in range(rank) if dim != over % rank)


def _make(b: Building, op: Op, places: Places) -> tuple[Part, ...]:
    x, *others = op.args

    def call(region: Region, device: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        return op.target, (Ref(b.gather(op, x.name, region, device)), *others), dict(op.kwargs)

    return each(b, op, places, call)


SOFTMAXES = dict.fromkeys(("softmax", "log_softmax"), Rule(_make, _cuts))
