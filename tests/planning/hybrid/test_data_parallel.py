"""Data parallelism and plain pipelines."""

from __future__ import annotations

import pytest

from fxpipe.errors import PlanError
from fxpipe.ir.plan.hybrid_plan import check, shape
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.planning.hybrid.data_parallel import accumulated, data_parallel, straight
from fxpipe.planning.hybrid.event_time import Problem, event_time
from tests.planning.hybrid.test_event_time import servers

CHAIN = Chain("m", 8, tuple(Layer(str(i), 1, 2, parameters=10, saved=40, cut=8) for i in range(4)))


def test_one_stage():
    problem = Problem(CHAIN, servers(1, 4, 1e3, 1e3, 0), 2)
    plan = data_parallel(problem)
    check(plan, 4, 4)
    assert shape(plan.stages) == "DP"
    assert event_time(problem, plan.stages) == pytest.approx(2 * 12 / 4 + 2 * 3 / 4 * 40 / 1e3)


def test_as_few_micro_batches_as_fit():
    """A device keeps 80 bytes for parameters, and 20 bytes for each of its samples."""
    plan, seconds = accumulated(CHAIN, servers(1, 4, 1e3, 1e3, 0, memory=80 + 2 * 20), batch=32)
    assert plan.micro_batches == 4  # of 2 samples each
    assert seconds == pytest.approx(32 / 8 * 12 / 4 + 0.06)
    with pytest.raises(PlanError, match="not one sample of m fits"):
        accumulated(CHAIN, servers(1, 4, 1e3, 1e3, 0, memory=99), batch=32)


def test_a_device_for_each_stage():
    chain = Chain("m", 1, tuple(Layer(str(i), f, 0) for i, f in enumerate([1, 1, 3, 2, 1])))
    plan = straight(Problem(chain, servers(1, 3, 1e3, 1e3, 0), 4))
    check(plan, 5, 3)
    assert [stage.end for stage in plan.stages] == [2, 3, 5]
    with pytest.raises(PlanError, match="5 layers: they cannot be cut into 6"):
        straight(Problem(chain, servers(1, 6, 1e3, 1e3, 0), 4))


def test_what_does_not_fit():
    problem = Problem(CHAIN, servers(1, 4, 1e3, 1e3, 0, memory=60), 2)
    with pytest.raises(PlanError, match="does not fit on each of the devices, with 8 samples"):
        data_parallel(problem)
    with pytest.raises(PlanError, match="does not fit in memory with a device for each stage"):
        straight(problem)
