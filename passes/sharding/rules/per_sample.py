"""Whatever is done to each sample by itself: a part has some of the samples, and all of every other dimension."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fxpipe.ir.graph.graph import Op, Ref, map_refs, op_name, refs
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Places, full
from fxpipe.passes.sharding.sharding_rule import Rule, each

# Where an op names the dimensions that it is done over: the position of the argument, and its name.
DIMS = {
    "amax": (1, "dim"), "amin": (1, "dim"), "argmax": (1, "dim"), "cumsum": (1, "dim"), "flip": (1, "dims"),
    "log_softmax": (1, "dim"), "mean": (1, "dim"), "normalize": (2, "dim"), "roll": (2, "dims"), "select": (1, "dim"),
    "softmax": (1, "dim"), "stack": (1, "dim"), "sum": (1, "dim"),
}  # fmt: skip
DEFAULTS = {"normalize": 1, "stack": 0}
ALONE = (
    "conv_transpose1d",
    "conv_transpose2d",
    "group_norm",
    "instance_norm",
    "interpolate",
    "pad",
    "repeat",
    "rms_norm",
)


def _first(b: GraphRewriter, name: str) -> Any:
    """The first dimension as the model has it, in the sizes of its inputs; None where there is none."""
    type = b.symbolic[name]
    return type.shape[0] if isinstance(type, TensorType) and type.shape else None


def dims(op: Op, rank: int) -> set[int]:
    """The dimensions that an op is done over; all if it names none."""
    given = argument(op, *DIMS[op_name(op)], DEFAULTS.get(op_name(op)))
    if given is None or given in ((), []):
        return set(range(rank))
    return {int(dim) % rank for dim in (given if isinstance(given, (tuple, list)) else (given,))}


def _cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """The first, if it is that of the samples in the result and in what is read of them, and in nothing else."""
    if op.writes or not isinstance(b.captured[op.name], TensorType):
        return ()
    read = [ref.name for ref in refs((op.args, dict(op.kwargs)))]
    samples = [name for name in read if name in b.samples]
    rank = max((len(b.shape(name)) for name in samples), default=0)
    if op_name(op) in DIMS and 0 in dims(op, rank + (op_name(op) == "stack")):
        return ()
    if op_name(op) == "pad" and len(argument(op, 1, "pad")) > 2 * (rank - 1):
        return ()
    alike = all(_first(b, name) == _first(b, op.name) for name in samples)
    held = any(_first(b, name) == _first(b, op.name) for name in read if name not in samples)
    return () if held or not alike or any(name in b.numbers for name in read) else (0,)


def _make(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    def call(region: Region, device: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        def value(ref: Ref) -> Any:
            if ref.name in b.samples:
                return Ref(b.gather(op, ref.name, (region[0], *full(b.shape(ref.name)[1:])), device))
            return Ref(b.whole(op, ref.name, device))

        return op.target, *map_refs((op.args, dict(op.kwargs)), value)

    return each(b, op, places, call)


SAMPLES = dict.fromkeys((*DIMS, *ALONE), Rule(_make, _cuts))
