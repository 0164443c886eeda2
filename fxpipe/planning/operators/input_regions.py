"""What a part of an operator must read: for a region of its output, the region of each of its inputs.

    conv2d, window 3, stride 2, padding 1        height 4..7 of the output needs 7..13 of the input
    linear, cut by channel                       needs all channels of its samples
    linear, 4 .. 8 of its summed dimension       needs channels 4 .. 8 of its samples
    concat of 64 and 32 channels                 channels 48..79 need 48..63 of the first, 0..15 of the second

Neighbouring parts of a convolution need overlapping rows of the same tensor (halos). As in the SOAP paper, these are
part of the region that each part reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fxpipe.ir.operators.operators import Operator, OperatorGraph
from fxpipe.ir.operators.strategy import Region


@dataclass(frozen=True)
class Need:
    """How the range needed in one dimension of an input follows from the range `first` .. `last` in dimension `along`
    of the output: `stride * first - before` up to, not including, `stride * last - before + window`, both divided by
    `divide`, if that many indices of the output belong to one of the input. `along` is -1 if all of the dimension is
    needed, and the number of dimensions of the output for the dimension that is summed over."""

    along: int
    stride: int = 1
    before: int = 0
    window: int = 1
    divide: int = 1


ALL = Need(-1)


def needs(graph: OperatorGraph, operator: Operator, which: int) -> tuple[Need, ...]:
    """What is needed of input number `which`, for each of its dimensions."""
    x = graph.operator(operator.inputs[which])
    rank = len(x.output)
    same = tuple(map(Need, range(rank)))
    kind = operator.kind
    inside = Need(len(operator.output)) if operator.summed else ALL
    if kind in ("conv1d", "conv2d", "pool1d", "pool2d"):
        slides = zip(operator.stride, operator.padding, operator.window, strict=True)
        area = tuple(Need(2 + at, stride, before, window) for at, (stride, before, window) in enumerate(slides))
        return (same[0], ALL if kind.startswith("conv") else same[1], *area)
    if kind in ("linear", "projected_softmax", "layer_norm", "softmax", "lstm", "attention") or (
        kind == "loss" and rank > len(operator.output)
    ):
        return (*same[:-1], inside)
    if kind == "embedding":
        return same  # a word for each place, in all channels
    if kind == "samplewise":
        return (same[0], *[ALL] * (rank - 1))
    if kind == "concat":
        before = sum(graph.operator(name).sizes[operator.axis] for name in operator.inputs[:which])
        return (*same[: operator.axis], Need(operator.axis, before=before), *same[operator.axis + 1 :])
    if kind == "flatten":
        return (same[0], Need(1, divide=prod(x.sizes[2:])), *[ALL] * (rank - 2))
    if kind == "matmul":
        return (*same[:-1], inside) if which == 0 else (*same[:-2], inside, same[-1])
    if kind == "scaled_dot_product" and which:
        return (same[0], ALL, same[2])
    skipped = len(operator.output) - rank  # operands of fewer dimensions are aligned at the last, as in torch
    return tuple(ALL if size == 1 else Need(skipped + at) for at, size in enumerate(x.sizes))


def needed(need: Need, region: Region, size: int) -> tuple[int, int]:
    """The range (first, after the last) needed in a dimension of `size` of the input; it may be empty. If `region` does
    not end with a range of the summed dimension, all of that is."""
    if not 0 <= need.along < len(region):
        return 0, size
    first, after = region[need.along]
    low = need.stride * first - need.before
    high = need.stride * (after - 1) - need.before + need.window
    low, high = low // need.divide, (high - 1) // need.divide + 1
    low = min(max(low, 0), size)
    return low, max(low, min(high, size))


def reads(graph: OperatorGraph, operator: Operator, region: Region) -> tuple[Region, ...]:
    """The region of each input that is read to compute a region of the output, which may end with the range of the
    dimension that is summed over."""
    return tuple(
        tuple(
            needed(need, region, size)
            for need, size in zip(needs(graph, operator, which), graph.operator(name).sizes, strict=True)
        )
        for which, name in enumerate(operator.inputs)
    )


def volume(region: Region) -> int:
    """The number of elements in a region."""
    return prod(after - first for first, after in region)
