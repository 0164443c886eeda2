"""Efficiencies of a device from a measured profile: those of a device that is known give its times back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fxpipe.ir.cluster.cluster import Device
from fxpipe.ir.cluster.matrix_speed import MatrixSpeed
from fxpipe.ir.cluster.roofline import reached
from fxpipe.ir.plan.profile import Profile
from fxpipe.profiling.calibrate import calibrate
from fxpipe.profiling.estimate import LAUNCH, estimate, model_products
from tests.helpers.profiling_graphs import trace

NOMINAL = Device("gpu", 10**9, 1e13, 1e11, matrices=(MatrixSpeed("f32", 4e11), MatrixSpeed("bf16", 8e11)))
GRAPH, _, _ = trace(nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 256)), torch.zeros(64, 512))


def run_on(device: Device) -> Profile:
    """What would be measured on a device that takes exactly what the roofline model says."""
    made = estimate(GRAPH, {}, device)
    ops = (
        replace(one, forward=max(one.forward - LAUNCH, 0), backward=max(one.backward - LAUNCH, 0)) for one in made.ops
    )
    return replace(made, source="measured", ops=tuple(ops))


@pytest.mark.parametrize(("products", "memory"), [(0.6, 0.25), (1.0, 1.0), (1.5, 2.0)])
def test_what_a_device_reaches_is_found(products: float, memory: float) -> None:
    speeds = (replace(NOMINAL.matrices[0], peak=4e11 * products), NOMINAL.matrices[1])
    real = replace(NOMINAL, matrices=speeds, bandwidth=1e11 * memory)
    found = calibrate(GRAPH, {}, run_on(real), NOMINAL)
    # A backward of two products has two launches in it, of which one is known.
    assert reached(found, "f32") == pytest.approx(4e11 * products, rel=0.05)
    assert found.bandwidth * found.memory_efficiency == pytest.approx(1e11 * memory, rel=0.05)
    assert all(one.efficiency <= 1 for one in found.matrices)
    assert found.memory_efficiency <= 1
    assert reached(found, "bf16") == 8e11  # the model has no such product
    assert "calibrated by" in found.source


def test_products_have_types() -> None:
    first, second = model_products(GRAPH, {}).values()
    assert (first.dtype, first.forward, first.backward) == ("f32", 2 * 64 * 512 * 512, 2 * 64 * 512 * 512)
    assert second.backward == 2 * second.forward == 4 * 64 * 512 * 256  # the first one's input needs no gradient
