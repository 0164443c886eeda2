"""The memory benchmark counts to the byte, and its formula holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import memory
from benchmarks.workload import Workload
from tests.helpers.marks import mostly_slow

SMALL = Workload(stages=3, chunks=4, rows=2, width=8, depth=2)
ONE = 2 * 8 * 4  # bytes of a micro-batch between layers


def test_a_meter_counts_what_lives() -> None:
    stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    meter = memory.Meter(stage)
    first = stage(torch.randn(2, 8))
    second = stage(torch.randn(2, 8))
    assert (meter.now, meter.peak) == (4 * ONE, 4 * ONE)  # input of the product and result of tanh, twice
    first.sum().backward()
    assert (meter.now, meter.peak) == (2 * ONE, 4 * ONE)
    del second
    assert meter.now == 0


def test_a_meter_counts_what_is_taken_to_be_recomputed() -> None:
    stage = nn.Linear(8, 8)
    meter = memory.Meter(stage)
    x = torch.randn(2, 8)
    with torch.no_grad():
        stage(x)
    assert meter.now == ONE
    del x
    assert (meter.now, meter.peak) == (0, ONE)


def test_the_sizes_of_a_micro_batch() -> None:
    found = memory.sizes(SMALL)
    assert found.taken == (ONE, ONE, ONE)
    assert (
        found.saved == (3 * ONE,) * 3
    )  # the inputs of two products, of which one is ReLU's result, and the last result


@pytest.mark.parametrize("checkpoint", memory.CHECKPOINTS)
@pytest.mark.parametrize("route", mostly_slow(memory.ROUTES, ("1f1b",).__contains__))
def test_the_formula_holds(route: str, checkpoint: str) -> None:
    expected = memory.formula(SMALL, route, checkpoint, memory.sizes(SMALL))
    assert memory.counted(SMALL, route, checkpoint) == expected


def test_the_formula_of_one_f_one_b() -> None:
    one = memory.Sizes(saved=(5, 5, 5), taken=(1, 1, 1))
    assert memory.formula(SMALL, "1f1b", "never", one) == (15, 10, 5 + 1)  # the loss saves its target
    assert memory.formula(SMALL, "1f1b", "always", one) == (7, 6, 5 + 1)
    assert memory.formula(SMALL, "gpipe", "always", one) == (8, 8, 11 + 1)
    assert memory.formula(SMALL, memory.CALL, "never", one) == (20, 20, 20)
