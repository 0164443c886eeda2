"""All planners, asked in the same way."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.plan.hybrid_plan import check, shape
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.planning.hybrid.plan_request import FEW, Request
from fxpipe.planning.hybrid.planners import PLANNERS, levels, search
from tests.planning.hybrid.test_event_time import servers

CHAIN = Chain("m", 4, tuple(Layer(str(i), 1 + i % 3, 2, parameters=10 + 30 * i, saved=40, cut=8) for i in range(6)))
CLUSTER = servers(2, 2, 1e3, 1e2, 0)


@pytest.mark.parametrize("planner", PLANNERS)
def test_each_makes_a_plan_that_optimal_is_not_slower_than(planner: str) -> None:
    request = Request((CHAIN,), CLUSTER, 16, seconds=60)  # it ends when its proof is done
    answer = search(planner, request)
    check(answer.plan, 6, 4)
    best = search("optimal", request)
    assert best.certificate is not None
    assert best.certificate.proven
    assert best.seconds <= answer.seconds * (1 + 1e-9)


def test_shapes() -> None:
    request = Request((CHAIN,), CLUSTER, 16, micro_batches=4)
    shapes = {name: shape(search(name, request).plan.stages) for name in ("data parallel", "straight", "gpipe")}
    assert shapes == {"data parallel": "DP", "straight": "straight", "gpipe": "straight"}
    assert search("straight", request).plan.micro_batches == 4


def test_what_does_not_fit_recomputes_if_it_may() -> None:
    """Stages of 3 layers take 60 bytes for parameters and 240 for each micro-batch; the first has two of them."""
    alike = Chain("m", 4, (Layer("a", 1, 2, parameters=10, saved=40, cut=8),) * 6)
    tight = Request((alike,), servers(1, 2, 1e3, 1e3, 0, memory=400), 16, 2, "early", copies=2)
    assert [stage.recompute for stage in search("straight", tight).plan.stages] == [True, False]
    roomy = replace(tight, cluster=servers(1, 2, 1e3, 1e3, 0))
    assert not any(stage.recompute for stage in search("straight", roomy).plan.stages)
    with pytest.raises(PlanError, match="does not fit in memory like that without recomputation"):
        search("straight", replace(tight, recompute=False))


def test_numbers_of_micro_batches() -> None:
    assert Request((CHAIN,), CLUSTER, 12).counts() == [1, 2, 3, 4, 6, 12]
    assert Request((CHAIN,), CLUSTER, 128).counts(most=3) == [8, 16, 32]
    assert Request((CHAIN,), CLUSTER, 128, micro_batches=5).counts(most=3) == [5]


def test_costs_at_several_micro_batches() -> None:
    """Each micro-batch costs 10 s more than its samples: few are best, and scaling alone would not know."""

    def chain(batch: int) -> Chain:
        layers = (Layer(e.name, batch * e.forward + 10, batch * e.backward, 1e5) for e in CHAIN.layers)
        return Chain("m", batch, tuple(layers))

    several = tuple(chain(batch) for batch in (1, 2, 4, 8, 16))
    alone = {m: search("optimal", Request(several, CLUSTER, 16, m)) for m in (1, 2, 4, 8, 16)}
    best = min(alone, key=lambda m: alone[m].seconds)
    found = search("optimal", Request(several, CLUSTER, 16))
    assert (found.plan.micro_batches, found.seconds) == (best, alone[best].seconds)
    assert best < search("optimal", Request(several[:1], CLUSTER, 16)).plan.micro_batches
    assert found.certificate is not None
    assert found.certificate.proven
    for name in ("dapple", "data parallel"):
        assert search(name, Request(several, CLUSTER, 16)).seconds >= found.seconds


def test_dapple_ends_in_time() -> None:
    request = Request((CHAIN,), CLUSTER, 16)
    whole, begun = search("dapple", request), search("dapple", replace(request, seconds=1e-9))
    assert (whole.unfinished, begun.unfinished) == (0, 2 * len(request.counts(FEW)))
    assert whole.seconds <= begun.seconds <= search("data parallel", request).seconds
    with pytest.warns(fxpipe.UnfinishedSearchWarning, match=r"did not end in 1 us, so this is the best plan that it"):
        fxpipe.plan(CHAIN, CLUSTER, 16, planner="dapple", time_limit=1e-6)


def test_levels() -> None:
    assert [(level.count, level.bandwidth) for level in levels(CLUSTER)] == [(2, 1e3), (2, 1e2)]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request((Chain("m", 1, ()),), CLUSTER, 8), "cannot plan: m has no layers"),
        (Request((CHAIN,), Cluster(()), 8), "cannot plan: the cluster has no devices"),
        (Request((CHAIN,), CLUSTER, 0), "batch_size is 0"),
        (Request((CHAIN,), CLUSTER, 8, micro_batches=9), "9 micro-batches of a batch of 8"),
        (Request((CHAIN,), CLUSTER, 8, warmup="soon"), "there is no warm-up 'soon'"),
    ],
)
def test_refusals(request_: Request, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        search("straight", request_)


def test_planners_that_are_not_there() -> None:
    with pytest.raises(PlanError, match="no planner 'best'; write one of 'optimal', 'dapple'"):
        search("best", Request((CHAIN,), CLUSTER, 8))
    with pytest.raises(PlanError, match="6 layers: they cannot be cut into 8 stages"):
        search("straight", Request((CHAIN,), servers(1, 8, 1e3, 1e3, 0), 8))
