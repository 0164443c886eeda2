"""Cheap values depend on sizes and literals alone; what only looks so is not cheap."""

from __future__ import annotations

from fxpipe.ir.program.cheap_ops import cheap_ops
from tests.helpers.planning_graphs import graph, vmap


def test_masks_and_positions() -> None:
    made = graph("m = ones(batch) : plain", "n = neg(m) : plain", "i = argmax(x) : plain", "y = add(i, n)")
    assert cheap_ops(made) == {"batch", "m", "n"}


def test_random_values_and_written_ones_are_not_cheap() -> None:
    made = graph("r = rand(batch)", "m = ones(batch) : plain", "m1 = add_(m) : plain ! m", "y = add(r, m1)")
    assert cheap_ops(made) == {"batch"}


def test_a_vmap_is_not_cheap() -> None:
    made = graph("m = ones(batch) : plain", *vmap("v", "m"), "y = add(x, v)")
    assert cheap_ops(made) == {"batch", "m"}
