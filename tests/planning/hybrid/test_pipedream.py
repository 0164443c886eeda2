"""PipeDream's dynamic programming against trying everything, and its levels by hand."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from fxpipe.ir.plan.hybrid_plan import HybridPlan, check
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.planning.hybrid.pipedream import Level, pipedream
from tests.planning.hybrid.test_event_time import random_chain


def steady(chain: Chain, stages, bandwidth: float) -> float:
    """What the slowest stage or transfer takes."""
    worst = 0.0
    for stage in stages:
        r, own = len(stage), [chain.layers[i] for i in stage.layers]
        ring = 2 * (r - 1) * sum(layer.parameters for layer in own) / bandwidth
        worst = max(worst, max(sum(layer.forward + layer.backward for layer in own), ring) / r)
        if stage.layers.start:
            worst = max(worst, 2 * chain.layers[stage.layers.start - 1].cut / bandwidth)
    return worst


class Range:
    def __init__(self, first, end, replicas):
        self.layers, self.replicas = range(first, end), replicas

    def __len__(self):
        return self.replicas


def every_plan(n: int, devices: int):
    for k in range(1, min(n, devices) + 1):
        for inner in combinations(range(1, n), k - 1):
            for split in combinations(range(1, devices), k - 1):
                cuts, counts = (0, *inner, n), (0, *split, devices)
                yield [Range(cuts[s], cuts[s + 1], counts[s + 1] - counts[s]) for s in range(k)]


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all(seed):
    rng = random.Random(seed)
    chain, devices, bandwidth = random_chain(rng, rng.randint(2, 6)), rng.randint(1, 4), rng.uniform(1e9, 1e11)
    stages = pipedream(chain, [Level(devices, bandwidth)])
    check(HybridPlan("m", stages, 1), len(chain), devices)
    ours = steady(chain, [Range(e.first, e.end, len(e.devices)) for e in stages], bandwidth)
    assert ours == pytest.approx(min(steady(chain, plan, bandwidth) for plan in every_plan(len(chain), devices)))


def test_a_worker_of_two_stages_is_replicated_as_a_whole():
    """In a server cuts are cheap and rings dear; between servers rings are cheap: both run the same two stages."""
    chain = Chain("m", 1, (Layer("a", 1, 1, parameters=40, cut=1), Layer("b", 1, 1, parameters=40)))
    stages = pipedream(chain, [Level(2, 10.0), Level(2, 1e9)])
    assert [(stage.first, stage.end, stage.devices) for stage in stages] == [(0, 1, (0, 2)), (1, 2, (1, 3))]
