"""Seconds that a part of an operator takes, forward and backward. A part's time depends on its kind and sizes, not on
values (the SOAP paper's assumption A1), so each is computed once.

The estimate is by the roofline model, and never less than the start of a kernel. Measured times take precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fxpipe.ir.cluster.cluster import Device
from fxpipe.ir.cluster.roofline import roofline
from fxpipe.ir.operators.operators import PRODUCTS, Operator, OperatorGraph
from fxpipe.ir.operators.strategy import Region

from .input_regions import reads, volume

Seconds = tuple[float, float]  # forward, backward


@dataclass(frozen=True)
class Part:
    """What a part's time depends on.

    - `operator`: the operator, without its name and inputs.
    - `sizes`: of the part's output.
    - `reads`: the sizes of what the part reads of each input.
    - `gradients`: whether the inputs need gradients.
    - `element`: bytes per element.
    - `dtype`: the element type of products.
    - `summed`: how much it adds up of the dimension that the operator sums over.
    """

    operator: Operator
    sizes: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    gradients: bool
    element: int = 4
    dtype: str = "f32"
    summed: int = 0

    @property
    def elements(self) -> int:
        found = 1
        for size in self.sizes:
            found *= size
        return found

    @property
    def share(self) -> float:
        """Of the dimension that the operator sums over."""
        return self.summed / self.operator.summed if self.operator.summed else 1.0

    @property
    def work(self) -> float:
        """Floating-point operations of its forward pass. A part of an embedding looks at every word."""
        share = self.share if self.operator.kind in PRODUCTS else 1.0
        return self.elements * self.operator.work * share

    @property
    def weights(self) -> float:
        """The number of weights that it holds."""
        share = self.share
        for dimension, size in zip(self.operator.output, self.sizes, strict=True):
            share *= size / dimension.size if dimension.role == "P" else 1.0
        return self.operator.weights * share


Cost = Callable[[Part, Device], Seconds]


def part(graph: OperatorGraph, operator: Operator, region: Region) -> Part:
    """The part of an operator that computes a region of its output. The region may end with the range of the summed
    dimension that the part adds up (`strategy.summed_regions`); without it, that is all."""
    taken, rank = reads(graph, operator, region), len(operator.output)
    first, after = region[rank] if len(region) > rank else (0, operator.summed)
    return Part(
        replace(operator, name="", inputs=(), shared=""),
        _sizes(region[:rank]),
        tuple(map(_sizes, taken)),
        any(graph.operator(name).kind != "input" for name in operator.inputs),
        graph.element,
        graph.dtype,
        after - first,
    )


def _sizes(region: Region) -> tuple[int, ...]:
    return tuple(after - first for first, after in region)


def estimated(launch: float = 5e-6) -> Cost:
    """Estimated times; `launch` is the seconds to start a kernel. Backward takes as long as forward for the gradients
    of the inputs, and again for those of the weights."""

    def cost(part: Part, device: Device) -> Seconds:
        if not part.operator.work:  # a view, such as flatten
            return 0.0, 0.0
        read = sum(volume(tuple((0, size) for size in sizes)) for sizes in part.reads)
        moved = part.element * (part.elements + read + part.weights)
        dtype = part.dtype if part.operator.kind in PRODUCTS else None
        forward = roofline(device, part.work, moved, dtype)
        passes = part.gradients + (part.operator.weights > 0)
        return max(forward, launch), max(passes * forward, launch)

    return cost


def measured(table: Mapping[Part, Seconds], otherwise: Cost) -> Cost:
    """Times from a table, for every device; parts that are not in it cost `otherwise`."""

    def cost(part: Part, device: Device) -> Seconds:
        found = table.get(part)
        return otherwise(part, device) if found is None else found

    return cost


def once(cost: Cost) -> Cost:
    """`cost` with a cache; devices of the same speed share it."""
    known: dict[object, Seconds] = {}

    def cached(part: Part, device: Device) -> Seconds:
        key = (part, device.speeds)
        if key not in known:
            known[key] = cost(part, device)
        return known[key]

    return cached
