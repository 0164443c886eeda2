"""Seconds of ops by the roofline model, by hand."""

from __future__ import annotations

import pytest

from fxpipe.ir.cluster.cluster import Device
from fxpipe.ir.cluster.matrix_speed import MatrixSpeed
from fxpipe.ir.cluster.published_clusters import H100
from fxpipe.ir.cluster.roofline import peak, reached, roofline

ONE = Device("a", 1, 1e12, 1e9, matrices=(MatrixSpeed("bf16", 8e12, 0.5),), memory_efficiency=0.5)


def test_products_run_at_the_speed_of_their_type() -> None:
    assert roofline(ONE, 4e12, 0, "bf16") == pytest.approx(1.0)
    assert roofline(ONE, 4e12, 0, "f32") == pytest.approx(4.0)  # no entry: as other arithmetic
    assert roofline(ONE, 4e12, 0) == pytest.approx(4.0)
    assert (peak(ONE, "bf16"), reached(ONE, "bf16"), peak(ONE, "f32")) == (8e12, 4e12, 1e12)


def test_the_slower_of_arithmetic_and_memory_counts() -> None:
    assert roofline(ONE, 4e12, 1e9, "bf16") == pytest.approx(2.0)


def test_narrow_types_are_faster_on_an_h100() -> None:
    seconds = [roofline(H100, 1e15, 0, dtype) for dtype in ("f32", "tf32", "bf16", "f8")]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 7 * seconds[1]
