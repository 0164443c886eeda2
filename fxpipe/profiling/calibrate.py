"""The efficiencies of a device from a measured profile: the shares of its peaks with which it really ran the ops of a
model. Estimates for that device, of this model at other sizes or of models like it, are then true of it.

    share of products of a type  =  seconds at the device's peaks / seconds measured,   summed over these products
    share of the bandwidth       =  the same, over all ops that are no products
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from fxpipe.ir.cluster.cluster import Device
from fxpipe.ir.cluster.matrix_speed import STORED, MatrixSpeed
from fxpipe.ir.cluster.roofline import peak
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.plan.profile import Profile

from .estimate import LAUNCH, estimate, model_products


def calibrate(graph: Graph, sizes: Mapping[str, int], measured: Profile, device: Device) -> Device:
    """The device with the efficiencies that `measured`, a profile of the graph at these `sizes`, shows. A device that
    was faster than its peak gets what was measured as its peak. What the profile has no ops of stays as it is."""
    found = {name: one.dtype for name, one in model_products(graph, sizes).items()}
    types = {dtype for dtype in found.values() if dtype in STORED}
    others = tuple(one for one in device.matrices if one.dtype not in types)
    peaks = tuple(MatrixSpeed(dtype, peak(device, dtype)) for dtype in sorted(types))
    ideal = estimate(graph, sizes, replace(device, matrices=(*others, *peaks), memory_efficiency=1.0))
    at_peak: dict[str | None, float] = defaultdict(float)
    took: dict[str | None, float] = defaultdict(float)
    for best, real in zip(ideal.ops, measured.ops, strict=True):
        for seconds, spent in ((best.forward, real.forward), (best.backward, real.backward)):
            if seconds > LAUNCH and spent > 0:
                at_peak[found.get(best.name)] += seconds - LAUNCH
                took[found.get(best.name)] += spent
    shares = {dtype: at_peak[dtype] / spent for dtype, spent in took.items()}
    speeds = (_speed(one, shares[one.dtype]) if one.dtype in shares else one for one in peaks)
    share = shares.get(None, device.memory_efficiency)
    return replace(
        device,
        matrices=(*others, *speeds),
        bandwidth=device.bandwidth * max(1.0, share),
        memory_efficiency=min(1.0, share),
        source=f"calibrated by {measured.model}, batch {measured.batch}" + (f"; {device.source}" * bool(device.source)),
    )


def _speed(one: MatrixSpeed, share: float) -> MatrixSpeed:
    return MatrixSpeed(one.dtype, one.peak * max(1.0, share), min(1.0, share))
