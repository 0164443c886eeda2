"""Hybrid plans: print, JSON, and what is refused."""

from dataclasses import replace

import pytest

from fxpipe.ir.dataclass_json import read, write
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage, check

PLAN = HybridPlan("m", (HybridStage(0, 2, (0, 1, 3)), HybridStage(2, 5, (2,), recompute=True)), 8, "late", "overlap")


def test_print():
    assert str(PLAN) == (
        "m: 2 stages 3:1, 8 micro-batches, late warm-up, all-reduce overlapped, ideal shares\n"
        "stage    layers    devices\n"
        "0        0 .. 1    0-1, 3\n"
        "1        2 .. 4    2          recomputes"
    )


def test_says_what_does_not_share_out_evenly():
    """Whole samples: 8 on 3 replicas are 3, 3 and 2."""
    assert str(replace(PLAN, samples=8)).splitlines()[::2] == [
        "m: 2 stages 3:1, 8 micro-batches, late warm-up, all-reduce overlapped",
        "0        0 .. 1    0-1, 3                 3 of 8 samples on 2 replicas, 2 on 1",
    ]
    assert "of 9 samples" not in str(replace(PLAN, samples=9))


def test_json_round_trip():
    assert read(HybridPlan, write(PLAN)) == PLAN
    with pytest.raises(ValueError, match="model is missing: write text"):
        read(HybridPlan, "{}")


def test_accepted():
    check(PLAN, layers=5, devices=4)
    check(replace(PLAN, stages=(HybridStage(0, 2, (0, 1)), HybridStage(2, 5, (0, 1)))), layers=5, devices=4)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, micro_batches=0), "0 micro-batches"),
        (replace(PLAN, warmup="PA"), "warm-up 'PA'"),
        (replace(PLAN, stages=PLAN.stages[:1]), "have 2 layers, the model 5"),
        (replace(PLAN, stages=PLAN.stages[1:]), "it starts at 0"),
        (replace(PLAN, stages=(HybridStage(0, 5, ()),)), "at least one"),
        (replace(PLAN, stages=(HybridStage(0, 5, (1, 0)),)), "ascending"),
        (replace(PLAN, stages=(HybridStage(0, 5, (4,)),)), "of 4"),
        (
            replace(PLAN, stages=(HybridStage(0, 2, (0, 1)), HybridStage(2, 5, (0,)))),
            "share all of their devices or none",
        ),
    ],
)
def test_refused(plan, message):
    with pytest.raises(ValueError, match=message):
        check(plan, layers=5, devices=4)
