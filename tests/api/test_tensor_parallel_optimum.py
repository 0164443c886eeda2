"""The plan over stages, replicas and tensor-parallel sizes is the fastest of all there are, with the same costs."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.api.tensor_parallel import candidates_of, degrees_of
from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster, Device, Link
from fxpipe.ir.plan.hybrid_plan import WARMUPS
from fxpipe.planning.hybrid.group_layers import costed, layers
from fxpipe.planning.hybrid.plan_request import Request, RequestWay
from tests.helpers.marks import mostly_slow
from tests.planning.hybrid.exact.test_several_ways import plans, seconds

BATCH, LAYERS = 8, 4


def instance(seed: int) -> tuple[nn.Module, torch.Tensor, Cluster, int]:
    """A few layers, on two or four devices of one or two servers with little memory or much."""
    draw = random.Random(seed)
    widths = [draw.choice([64, 256, 1024]) for _ in range(LAYERS + 1)]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)))
        x = torch.zeros(BATCH, draw.choice([1, 32]), widths[0])
    servers, each = draw.choice([(1, 2), (1, 4), (2, 2)])
    memory = draw.choice([10**12, 10**7, 3 * 10**7])
    devices = tuple(
        Device(f"gpu:{s * each + d}", memory, 1e12, 1e11, f"s{s}") for s in range(servers) for d in range(each)
    )
    links = [Link((f"s{s}", f"s{s}"), 10 ** draw.uniform(9, 12), 1e-6) for s in range(servers)]
    links += [Link(("s0", "s1"), 10 ** draw.uniform(8, 10), 1e-5)] if servers > 1 else []
    return model, x, Cluster(devices, tuple(links)), draw.choice([1, 2, 4])


def fastest(model: nn.Module, x: torch.Tensor, cluster: Cluster, micro_batches: int) -> float:
    """The seconds of the fastest of all plans, each of whose stages has a size of its own; inf if none fits."""
    whole = fxpipe.profile(model, x, device=cluster)
    known = whole.at(BATCH // micro_batches)
    made, best = layers(whole.graph, whole, LAYERS), inf
    alone = (costed(known.graph, known, made),)
    found, _ = candidates_of([known], made, cluster, degrees_of("auto", cluster), lambda: alone)
    ways = tuple(RequestWay(one.degree, one.chains, one.cluster) for one in found)
    for warmup in WARMUPS:
        request = Request(alone, cluster, BATCH, micro_batches, warmup, False, ways=ways)
        for stages in plans(request):
            best = min(best, seconds(request, stages, best))
    return best


@pytest.mark.parametrize("seed", mostly_slow(range(12), lambda seed: seed < 2))
def test_equals_brute_force(seed: int) -> None:
    model, x, cluster, micro_batches = instance(seed)
    best = fastest(model, x, cluster, micro_batches)

    def plan() -> fxpipe.Planned:
        return fxpipe.plan(
            model, cluster, BATCH, example_inputs=(x,), micro_batches=micro_batches, recompute=False,
            tensor_parallel="auto", most_layers=LAYERS,
        )  # fmt: skip

    if best == inf:
        with pytest.raises(PlanError, match="memory"):
            plan()
        return
    found = plan()
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.certificate is not None
    assert found.certificate.proven
