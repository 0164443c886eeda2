"""The times of a changed strategy are those of a simulation from nothing, to the last bit, for every task."""

import pytest

from tests.helpers.marks import mostly_slow

pytest.importorskip("numba")

from random import Random

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.full_simulation import FullCore
from fxpipe.api.search import operators_of
from fxpipe.ir.cluster.published_clusters import k80s, p100s
from fxpipe.planning.operators.expert_strategies import data_parallel, scattered
from fxpipe.planning.operators.models.published_models import MODELS
from fxpipe.planning.operators.operator_costs import estimated
from fxpipe.planning.operators.simulate_strategy import simulate
from tests.helpers.operator_graphs import branches, cluster, lenet, rnnlm, translation
from tests.helpers.random_operator_graphs import network, strategy

PROPOSALS = {"alexnet": 2300, "resnet": 300, "inception": 300, "rnntc": 150, "rnnlm": 200, "nmt": 90}


class SharedKeys(nn.Module):
    """Two queries for each key: keys are repeated in a dimension of their own, the fifth."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.mix = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)

    def forward(self, x):
        b, n, _ = x.shape
        queries, keys = (layer(x).view(b, n, -1, 4).transpose(1, 2) for layer in (self.query, self.key))
        keys = keys[:, :, None].expand(b, 2, 2, n, 4).reshape(b, 4, n, 4)
        return self.mix(F.scaled_dot_product_attention(queries, keys, keys).transpose(1, 2).reshape(b, n, 16))


def shared_keys():
    graph = operators_of(SharedKeys(), cluster(4), (torch.zeros(8, 6, 16),), None)
    assert max(len(operator.sizes) for operator in graph) == 5
    return graph


GRAPHS = {
    "lenet": lenet, "branches": branches, "rnnlm": rnnlm, "translation": translation, "shared keys": shared_keys
}  # fmt: skip


def follow(core, proposals):
    """One proposal after the other; every second chain takes nearly all, every other refuses most."""
    moved = 0
    for step in range(proposals):
        before = core.seconds
        core.explore(1, before * (1e6 if step % 2 else 1e-3))
        moved += core.seconds != before
        assert core.differences() == 0, f"proposal {step}"
    return moved


@pytest.mark.parametrize("devices", [4, 6, 8])
@pytest.mark.parametrize("name", GRAPHS)
def test_all_times_of_all_tasks_after_each_proposal(name, devices):
    graph = GRAPHS[name]()
    core = FullCore(graph, cluster(devices, servers=2), estimated(), seed=devices)
    core.begin(scattered(graph, devices, Random(1)))
    assert follow(core, 100) > 20


@pytest.mark.parametrize(
    "devices", [pytest.param(4, marks=pytest.mark.long), 8, pytest.param(16, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", mostly_slow(MODELS, ("alexnet", "rnnlm", "rnntc").__contains__))
def test_published_graphs(name, devices):
    """All in all more than 10,000 proposals, most of them where they are cheap."""
    graph = MODELS[name]()
    core = FullCore(graph, p100s(devices // 4), estimated(), seed=devices, capacity=1 << 20)
    core.begin(scattered(graph, devices, Random(devices)))
    assert follow(core, PROPOSALS[name]) > PROPOSALS[name] // 4


def test_that_these_are_10_000_proposals():
    assert 3 * sum(PROPOSALS[name] for name in MODELS) >= 10_000


@pytest.mark.long
def test_a_published_graph_on_64_devices():
    graph = MODELS["nmt"]()
    core = FullCore(graph, k80s(16), estimated(), capacity=1 << 22)
    core.begin(scattered(graph, 64, Random(1)))
    assert follow(core, 60) > 10


@pytest.mark.parametrize("name", GRAPHS)
def test_the_compiled_core_agrees_with_plain_python(name):
    graph, machine, cost = GRAPHS[name](), cluster(4, servers=2), estimated()
    core = FullCore(graph, machine, cost)
    for seed in range(5):
        strategy = scattered(graph, 4, Random(seed))
        assert core.begin(strategy) == pytest.approx(simulate(graph, machine, strategy, cost), rel=1e-12)
        assert core.strategy == strategy


def test_equal_times_everywhere_are_ordered_by_keys():
    """Costs and messages of exactly one second: nearly every task is ready when another is."""
    graph = translation(steps=2)
    core = FullCore(graph, cluster(4, bandwidth=1e300, latency=1.0), lambda part, device: (1.0, 1.0))
    core.begin(data_parallel(graph, 4))
    assert follow(core, 300) > 50


def test_tasks_that_take_no_time():
    graph = branches()
    core = FullCore(graph, cluster(4, bandwidth=1e300, latency=1.0), lambda part, device: (0.0, 0.0))
    core.begin(data_parallel(graph, 4))
    follow(core, 300)


def test_the_core_grows_when_messages_need_room():
    graph = branches()
    core = FullCore(graph, cluster(4), estimated(), capacity=8)
    core.begin(scattered(graph, 4, Random(0)))
    assert follow(core, 100) > 10
    assert len(core.state.message) > 8


def test_the_chain_is_the_same_with_either_simulation():
    graph = rnnlm()
    found = []
    for walk in ("explore", "walk_from_nothing"):
        core = FullCore(graph, cluster(4), estimated(), seed=3)
        core.begin(data_parallel(graph, 4))
        getattr(core, walk)(500, core.seconds * 0.05)
        found.append((core.strategy, core.seconds))
    assert found[0] == found[1]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.sampled_from([1, 2, 3]))
def test_random_networks_and_any_strategy(seed, devices, holders):
    """Parts of any number on any devices, several on one, with several holders; then what the chain makes of it."""
    graph, machine, cost = network(seed).graph, cluster(devices, servers=2), estimated()
    start = strategy(graph, devices, Random(seed), holders)
    core = FullCore(graph, machine, cost, (start,), "SAP" if holders == 1 else "SAPR", seed=seed)
    assert core.begin(start) == pytest.approx(simulate(graph, machine, start, cost), rel=1e-12)
    assert core.differences() == 0
    follow(core, 10)
