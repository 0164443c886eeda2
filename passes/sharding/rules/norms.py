"""Layer norm: over dimensions that are not cut, with all of their weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fxpipe.ir.arguments import argument
from fxpipe.ir.graph import Op, Ref
from fxpipe.ir.strategy import Region
from fxpipe.passes.sharding.building import Building, Part
from fxpipe.passes.sharding.regions import Places
from fxpipe.passes.sharding.rule import Rule, each, with_arguments

NAMES = ("input", "normalized_shape", "weight", "bias")


def _cuts(b: Building, op: Op) -> Iterable[int]:
    """All dimensions but the normalised ones."""
    return range(len(b.shape(op.name)) - len(argument(op, 1, "normalized_shape")))


def _make(b: Building, op: Op, places: Places) -> tuple[Part, ...]:
    held = {name: argument(op, at, name) for at, name in enumerate(NAMES) if at > 1}

    def call(region: Region, device: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        changed = {name: Ref(b.whole(op, one.name, device)) for name, one in held.items() if one is not None}
        changed["input"] = Ref(b.gather(op, argument(op, 0, "input").name, region, device))
        return op.target, *with_arguments(op, changed, NAMES)

    return each(b, op, places, call)


NORMS = {"layer_norm": Rule(_make, _cuts)}
