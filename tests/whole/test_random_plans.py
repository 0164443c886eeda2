"""Random chains on random clusters: every plan is legal and fits, and no simple one is faster than the best."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxpipe
from fxpipe.api.cheaper_cuts import fits
from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster, Device
from fxpipe.ir.cluster.published_clusters import servers
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.pipe.results import planned

LAYERS = st.builds(
    Layer,
    st.just("layer"),
    *(st.floats(0, 3) for _ in range(2)),
    parameters=st.integers(0, 50),
    saved=st.integers(0, 50),
    cut=st.integers(0, 50),
)
CHAINS = st.builds(Chain, st.just("m"), st.integers(1, 4), st.lists(LAYERS, min_size=1, max_size=6).map(tuple))
SPEEDS = st.floats(1, 1e3)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    device = Device("d", draw(st.integers(50, 2000)), 1.0, 1.0)
    count, each = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1), (4, 1)]))
    return servers(count, each, device, draw(SPEEDS), draw(SPEEDS), 0.0, draw(st.floats(0, 0.1)))


@settings(max_examples=40, deadline=None)
@given(CHAINS, clusters(), st.sampled_from([1, 4, 6, 8]), st.sampled_from(["auto", True, False]))
def test_nothing_simple_is_faster(
    chain: Chain, cluster: Cluster, batch: int, recompute: bool | Literal["auto"]
) -> None:
    simple = []
    for planner in ("data parallel", "straight", "gpipe", "dapple", "pipedream"):
        try:
            simple.append(fxpipe.plan(chain, cluster, batch, planner=planner, recompute=recompute))
        except PlanError:
            continue
    try:
        best = fxpipe.plan(chain, cluster, batch, recompute=recompute, time_limit=5)
    except PlanError:
        assert not simple
        return
    for found in (best, *simple):
        planned.check(found)
        assert fits(found)
        assert best.seconds <= found.seconds * (1 + 1e-6)
    assert best.certificate is not None
    assert best.certificate.bound <= best.seconds * (1 + 1e-6)


@given(
    st.sampled_from(["forward", "backward", "parameters", "saved", "cut"]),
    st.sampled_from([-1.0, float("nan"), float("inf")]),
)
@settings(max_examples=10, deadline=None)
def test_costs_that_cannot_be(column: str, value: float) -> None:
    costs = {"forward": 1.0, "backward": 1.0, column: value}
    with pytest.raises(PlanError, match="cannot plan: layer 'a' of m has a cost that cannot be"):
        fxpipe.plan(Chain("m", 1, (Layer("a", **costs),)), "A", 8)


@pytest.mark.parametrize("figures", [(0, 1.0, 1.0), (1, -1.0, 1.0), (1, 1.0, 0.0)])
def test_devices_that_cannot_be(figures: tuple[int, float, float]) -> None:
    cluster = Cluster((Device("cuda:0", *figures),))
    with pytest.raises(PlanError, match="cannot plan: device cuda:0 has a figure that is not positive"):
        fxpipe.plan(Chain("m", 1, (Layer("a", 1, 1),)), cluster, 8)
