"""Layer norm and softmax: the dimensions that they normalise over are not cut; a layer norm reads all of its weights.

Batch norm in training normalises over the samples and the area, which may be cut: each part computes its mean and
variance, and these are combined on one device (Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", 1979). The running statistics change once, by the statistics of all parts.

    x_0  mean_0 = mean(x_0), var_0 = var(x_0)         mean = sum of share_i * mean_i
    x_1  mean_1 = mean(x_1), var_1 = var(x_1)         var  = sum of share_i * (var_i + (mean_i - mean) ** 2)

    y_i = bias + (x_i - mean) * (weight / sqrt(var + eps))

`share_i` is the fraction of a channel's values that are in part i. Each range of channels is computed by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from fxpipe.ir.graph.graph import Op, Ref
from fxpipe.ir.graph.graph import Region as Context
from fxpipe.ir.graph.op_arguments import argument
from fxpipe.ir.operators.batch_norm_ops import arguments
from fxpipe.ir.operators.strategy import Region
from fxpipe.passes.sharding.graph_rewriter import GraphRewriter, Part
from fxpipe.passes.sharding.part_regions import Place, Places, extent
from fxpipe.passes.sharding.sharding_rule import Called, Rule, each, every, reading

NAMES = ("input", "normalized_shape", "weight", "bias")


def _layer_norm_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """All dimensions but the normalised ones."""
    return range(len(b.shape(op.name)) - len(argument(op, 1, "normalized_shape")))


def _layer_norm(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    return reading(b, op, places, NAMES, lambda region: {"weight": None, "bias": None, "input": region})


def _softmax_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """All dimensions but the one that it is over."""
    over, rank = argument(op, 1, "dim"), len(b.shape(op.name))
    return () if over is None else (dim for dim in range(rank) if dim != over % rank)


def _softmax(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    return reading(b, op, places, ("input",), lambda region: {"input": region})


NO_GRAD = (Context("grad", (False,)),)
Given = Mapping[str, Any]
Step = Callable[..., Ref]


def _batch_norm_cuts(b: GraphRewriter, op: Op) -> Iterable[int]:
    """Any dimension; none in training in half precision, where torch computes the statistics in single precision."""
    given = arguments(op)
    halves = given is not None and given["training"] and b.typed(op.name, ()).dtype in ("f16", "bf16")
    return () if given is None or halves else every(b, op)


def _batch_norm(b: GraphRewriter, op: Op, places: Places) -> tuple[Part, ...]:
    given = arguments(op)
    assert given is not None
    return _by_statistics_of_all(b, op, given, places) if given["training"] else _by_running(b, op, given, places)


def _by_running(b: GraphRewriter, op: Op, given: Given, places: Places) -> tuple[Part, ...]:
    """In evaluation, each value is normalised by its channel's running statistics."""

    def call(region: Region, device: int) -> Called:
        image = b.read(op, given["input"], region, device)
        held = (given[key] for key in ("running_mean", "running_var", "weight", "bias"))
        rows = (one and b.read(op, one, (region[1],), device) for one in held)
        return F.batch_norm, (image, *rows, False, 0.0, given["eps"]), {}

    return each(b, op, places, call)


def _by_statistics_of_all(b: GraphRewriter, op: Op, given: Given, places: Places) -> tuple[Part, ...]:
    """Normalise each range of channels by itself; then update the running statistics."""
    names = dict(zip(places, b.part_names(op, places), strict=True))
    parts: dict[Place, Part] = {}
    statistics = []
    for channels in sorted({place.region[1] for place in places}):
        members = [place for place in places if place.region[1] == channels]
        mean, var = _statistics(b, op, given["input"], members)
        statistics.append((mean, var))
        scale, shift = _scale(b, op, given, var, members[0])
        for place in members:
            name = _normalised(b, op, given, names[place], place, (mean, scale, shift))
            parts[place] = Part(name, place.region, place.device)
    if op.writes:
        _update(b, op, given, statistics, places[0].device)
    return tuple(parts[place] for place in places)


def _on(b: GraphRewriter, op: Op, device: int, shape: Sequence[int]) -> Step:
    """Adds ops whose results have this shape."""

    def step(stem: str, target: Any, *args: Any, **kwargs: Any) -> Ref:
        name = b.free(f"{op.name}_{stem}")
        return Ref(b.add(op, name, device, target, args, kwargs, type=b.typed(op.name, shape)))

    return step


def _statistics(b: GraphRewriter, op: Op, x: Ref, members: Sequence[Place]) -> tuple[Ref, Ref]:
    """Mean and variance of a range of channels."""
    rank, size = len(members[0].region), extent(members[0].region)[1]
    dims = [dim for dim in range(rank) if dim != 1]
    means, variances = [], []
    for place in members:
        step = _on(b, op, place.device, (size,))
        part = b.read(op, x, place.region, place.device)
        means.append(step("mean", torch.mean, part, dims))
        variances.append(step("var", torch.var, part, dims, correction=0))
    if len(members) == 1:
        return means[0], variances[0]
    volumes = [prod(extent(place.region)) for place in members]
    row, rows = _on(b, op, members[0].device, (size,)), _on(b, op, members[0].device, (len(members), size))
    means_of_all, variances_of_all = rows("means", torch.stack, means), rows("vars", torch.stack, variances)
    shares = _on(b, op, members[0].device, (len(members),))(
        "shares", "new_tensor", means_of_all, [volume / sum(volumes) for volume in volumes]
    )
    mean = row("mean", torch.matmul, shares, means_of_all)
    apart = rows("apart", torch.square, rows("off", operator.sub, means_of_all, mean))
    return mean, row("var", torch.matmul, shares, rows("spread", operator.add, variances_of_all, apart))


def _scale(b: GraphRewriter, op: Op, given: Given, var: Ref, place: Place) -> tuple[Ref, Ref | None]:
    """The factor of a range of channels, and the bias added after it (or None), for all its parts."""
    step = _on(b, op, place.device, extent(place.region[1:2]))
    scale = step("scale", torch.rsqrt, step("var_eps", operator.add, var, given["eps"]))
    rows = place.region[1:2]
    if given["weight"] is not None:
        scale = step("scale", operator.mul, scale, b.read(op, given["weight"], rows, place.device))
    return scale, given["bias"] and b.read(op, given["bias"], rows, place.device)


def _normalised(
    b: GraphRewriter, op: Op, given: Given, name: str, place: Place, channels: tuple[Ref, Ref, Ref | None]
) -> str:
    shape, device = extent(place.region), place.device
    wide = (shape[1], *[1] * (len(shape) - 2))
    reshape, step = _on(b, op, device, wide), _on(b, op, device, shape)
    mean, scale, shift = (
        one and (one if len(wide) == 1 else reshape("channels", "reshape", one, wide)) for one in channels
    )
    centred = step("centred", operator.sub, b.read(op, given["input"], place.region, device), mean)
    last = (operator.mul, (centred, scale)) if shift is None else (torch.addcmul, (shift, centred, scale))
    return b.add(op, name, device, *last, type=b.typed(op.name, shape))


def _update(b: GraphRewriter, op: Op, given: Given, statistics: Sequence[tuple[Ref, Ref]], device: int) -> None:
    """Update the running mean and variance; the variance is the unbiased estimate."""
    shape = b.shape(op.name)
    count = prod(shape) // shape[1]
    momentum = given["momentum"]
    if isinstance(momentum, Ref):
        momentum = b.on(op, momentum, device)
    for at, key in enumerate(("running_mean", "running_var")):
        state = given[key].name
        type = replace(b.typed(state, b.shape(state)), grad=False)

        def step(stem: str, target: Any, *args: Any, writes: tuple[str, ...] = ()) -> Ref:
            name = b.free(stem)
            return Ref(b.add(op, name, device, target, args, type=type, regions=NO_GRAD, writes=writes))  # noqa: B023

        new = [pair[at] for pair in statistics]
        own = new[0] if len(new) == 1 else step(f"{op.name}_{key}", torch.cat, new)
        if key == "running_var":
            own = step(f"{op.name}_{key}", operator.mul, own, count / max(count - 1, 1))
        if b.typed(op.name, ()).dtype != type.dtype:
            own = step(f"{op.name}_{key}", "type_as", own, Ref(state))
        step(state, "lerp_", Ref(state), own, momentum, writes=(state,))


NORMS = {
    "layer_norm": Rule(_layer_norm, _layer_norm_cuts),
    **dict.fromkeys(("softmax", "log_softmax"), Rule(_softmax, _softmax_cuts)),
    "batch_norm": Rule(_batch_norm, _batch_norm_cuts),
}
