"""The real profiles: never above the best plan that was known before, nor above DAPPLE's."""

from __future__ import annotations

import pytest

from benchmarks.dapple import TABLE_V
from benchmarks.paper_data import MISSING, folder
from benchmarks.planning import KNOWN, plan, problem, sensible
from fxpipe.ir.plan.layer_chain import Chain, Layer, check
from fxpipe.planning.hybrid.dapple import dapple
from fxpipe.planning.hybrid.event_time import event_time

QUICK = [("VGG-19", "B"), ("VGG-19", "C"), ("GNMT-16", "B")]
CASES = {case.model: case for case in TABLE_V}


def test_layers_of_less_than_nothing_join_the_one_before():
    chain = Chain("m", 1, (Layer("a", 2, 2, 5), Layer("b", 1, 1, 3), Layer("c", -2, 0, -3, cut=7), Layer("d", 1, 1)))
    check(sensible(chain))
    assert [layer.name for layer in sensible(chain).layers] == ["a, b, c", "d"]
    assert sensible(chain).layers[0].cut == 7


@pytest.mark.skipif(folder() is None, reason=MISSING)
@pytest.mark.parametrize(
    ("model", "cluster"),
    [pytest.param(*key, marks=[] if key in QUICK else pytest.mark.slow) for key in KNOWN],
)
def test_no_plan_known_is_better(model, cluster):
    found, task = plan(CASES[model], cluster, seconds=60), problem(CASES[model], cluster)
    assert found.seconds * 1e3 < KNOWN[model, cluster] + 0.05  # which are rounded to 0.1 ms
    assert found.seconds <= event_time(task, dapple(task).stages) * (1 + 1e-9)
    assert found.certificate.seconds < 60
    assert found.certificate.bound <= found.seconds
