"""A graph with a device for every op: a captured graph cut by a strategy. Ops stand in an order in which they can run;
a value that an op on another device reads has to go there.

    device 0   x_0 = linear(image_0, weight[0:64])
    device 1   x_1 = linear(image_1, weight[64:128])
    device 0   x = cat([x_0, x_1], 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxpipe.ir.graph.graph import Graph, show_op

from .operators import Operator
from .strategy import Config


@dataclass(frozen=True)
class Placed:
    """The graph and its devices.

    - `devices`: for each op of `graph`, by name, the number of its device.
    - `cuts`: how a strategy cuts each operator; empty without one.
    - `groups`: for ops of operators, by name, the number of the group that a strategy recomputes them in, or -1 for
      those that it does not recompute; empty if it recomputes nothing. Other ops go with any of them.
    """

    graph: Graph
    devices: Mapping[str, int]
    cuts: tuple[tuple[Operator, Config], ...] = ()
    groups: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(f"device {self.devices[op.name]}   {show_op(op)}" for op in self.graph.ops)


def check(placed: Placed, devices: int) -> None:
    """Raise ValueError if an op has no device, or one that is not among `devices` devices."""
    for op in placed.graph.ops:
        device = placed.devices.get(op.name)
        if device is None or not 0 <= device < devices:
            raise ValueError(f"op {op.name} is on device {device}; there are devices 0 to {devices - 1}")
