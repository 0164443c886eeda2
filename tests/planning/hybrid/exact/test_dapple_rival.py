"""The answer is never slower than the plan of DAPPLE's planner, or says that it may be."""

from __future__ import annotations

import random

import pytest

from fxpipe.errors import PlanError
from fxpipe.ir.plan.layer_chain import Chain, Layer, scaled
from fxpipe.planning.hybrid.exact.dapple_rival import Rival
from fxpipe.planning.hybrid.exact.search_phases import PlanSearch, cases_of, seed
from fxpipe.planning.hybrid.plan_request import Certificate, Request
from fxpipe.planning.hybrid.planners import search
from tests.planning.hybrid.test_event_time import random_chain, servers


def begun(request: Request) -> Rival:
    """A search that has only its simplest plans, and no bounds, so that DAPPLE's planner has to be asked."""
    cases = cases_of(request)
    hunt = PlanSearch(cases, float("inf"))
    seed(hunt)
    return Rival(hunt, request)


def random_request(number: int) -> Request:
    rng = random.Random(number)
    chain = random_chain(rng, rng.randint(3, 7))
    need = max(4 * layer.parameters + layer.saved for layer in chain.layers)
    memory = rng.choice([10**18, int(need * rng.uniform(1, 4)) + 1])
    count, each = rng.choice([(4, 1), (2, 2), (1, 4), (3, 1)])
    cluster = servers(count, each, 1e10, 10 ** rng.uniform(8, 9), rng.choice([0.0, 1e-4]), memory)
    return Request((chain,), cluster, 12, recompute=rng.choice([None, None, False]), seconds=60)


def compare(request: Request) -> None:
    rival = begun(request)
    rival.ask(float("inf"))
    assert rival.unfinished == 0
    try:
        theirs = search("dapple", request)
    except PlanError:
        return
    assert rival.hunt.time <= theirs.seconds * (1 + 1e-12)


@pytest.mark.parametrize("number", range(8))
def test_dapples_plan_is_among_those_that_are_compared(number: int) -> None:
    compare(random_request(number))


def llama() -> Chain:
    """64 blocks like those of a Llama, between what is made of tokens and what tokens are made of."""
    block = Layer("block", 0.004, 0.008, parameters=4e8, saved=1e9, cut=3.3e7)
    ends = Layer("embed", 0.0002, 0.0004, 2.6e8, 6.7e7, 3.3e7), Layer("head", 0.002, 0.004, 2.6e8, 5e8)
    return Chain("llama", 8, (ends[0], *[block] * 62, ends[1]))


def test_64_layers_on_16_devices() -> None:
    """As many layers as a large Llama has, on two servers of eight."""
    cluster = servers(2, 8, 1.5e11, 1.2e10, 5e-6, 80 * 10**9)
    compare(Request((llama(),), cluster, 8 * 32, 32, "early"))


def test_costs_at_few_sizes() -> None:
    """DAPPLE's planner tries more numbers of micro-batches than there are sizes; the answer is for all of them."""
    chain = random_chain(random.Random(3), 5)
    chains = chain, scaled(chain, chain.batch / 2)
    request = Request(chains, servers(2, 1, 1e10, 1e9, 0), 8 * chain.batch, seconds=60)
    assert search("optimal", request).seconds <= search("dapple", request).seconds * (1 + 1e-12)


def test_a_planner_that_is_stopped_is_told() -> None:
    request = random_request(0)
    rival = begun(request)
    rival.ask(0.0)
    unfinished = rival.unfinished
    assert unfinished > 0
    said = str(Certificate(1.0, 0.5, 1, 1, 1.0, unfinished=unfinished))
    assert f"perhaps above DAPPLE's plan, whose planner did not end in time ({unfinished} searches)" in said
    rival.ask(float("inf"))
    assert rival.unfinished == 0
    assert "DAPPLE" not in str(Certificate(1.0, 0.5, 1, 1, 1.0))
