"""The released planner of DAPPLE: small cases by hand, and the tables of the paper where its figures are at hand."""

from __future__ import annotations

import json

import pytest

from benchmarks.dapple import states, table_v
from benchmarks.dapple_profiles import read
from benchmarks.dapple_released import (
    CONFIGURATIONS,
    Job,
    Machine,
    best,
    candidates,
    data_parallel_time,
    hybrid_plan,
    pure_placements,
)
from benchmarks.paper_data import MISSING, expected, folder
from fxpipe.errors import PlanError
from fxpipe.ir.plan.layer_chain import Chain, Layer, check

with_figures = pytest.mark.skipif(folder() is None, reason=MISSING)


def test_transfers_and_rings():
    machine = Machine((4, 4), p2p=1.0, all_reduce=3.0, nvlink=25.0)
    assert machine.receive((2, 2), (0, 1)) == 0.5  # a half of the senders are elsewhere
    assert machine.receive((4, 0), (0, 4)) == 1.0
    assert machine.receive((1, 0), (2, 0)) == 1 / 25
    assert machine.receive((1, 0), (1, 1)) == 1 / 3
    assert machine.ring((1, 0)) == 0
    assert machine.ring((4, 0)) == pytest.approx(2 * 3 / 4 / 50)
    assert machine.ring((2, 2)) == pytest.approx(2 * 3 / 4 / 3)


def test_two_alike_layers_on_two_devices():
    """Without parameters and with little to send, two stages and two replicas are as fast; each stage has a layer."""
    chain = Chain("m", 1, (Layer("a", 1, 1, parameters=100, cut=1), Layer("b", 1, 1, parameters=100)))
    found = best(Job(chain, Machine((1, 1), 10.0, 10.0), batch=4, micro_batch=1))
    assert [(stage.first, stage.end, stage.counts) for stage in found.stages] == [(0, 1, (1, 0)), (1, 2, (0, 1))]
    # block 2 s (3 more of them), the first takes 4, and the transfer 0.1
    assert found.latency == pytest.approx(3 * 2 + 4 + 0.1)


def test_all_reduce_overlaps_only_the_backward_of_the_last_micro_batch():
    chain = Chain("m", 1, (Layer("a", 1, 1, parameters=0), Layer("b", 1, 1, parameters=3)))
    job = Job(chain, Machine((1, 1), 1.0, 1.0, memory=8), batch=4, micro_batch=1)
    # two samples fit: 6 bytes for them, 3 for parameters. b is done after 2 s, its ring takes 3; a's backward 2 more
    assert data_parallel_time(job, activations=2.5, copies=1) == pytest.approx(16 / 2 + 1)
    assert data_parallel_time(job, activations=6, copies=1) == float("inf")


def test_a_plan_of_several_pipelines_is_one_of_larger_micro_batches():
    chain = Chain("m", 1, (Layer("a", 1, 1, cut=1), Layer("b", 1, 1)))
    job = Job(chain, Machine((2, 2), 1e9, 1e9), batch=16, micro_batch=1)
    two = next(one for one in candidates(job) if one.pipelines == 2 and len(one.stages) == 2)
    plan = hybrid_plan(job, two)
    assert plan.micro_batches == 8
    assert [stage.devices for stage in plan.stages] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "dapple-profile/1", "chain": [{}]}'])
def test_what_is_not_a_profile(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"p\.json"):
        read(path)


def test_reads_a_profile(tmp_path):
    layer = {"name": "a", "fwd_ms": 1, "bwd_ms": 2, "param_bytes": 3, "output_bytes": 4, "cut_bytes": 5}
    state = {"antichain": ["a"], "cum_fwd_ms": 1, "cum_bwd_ms": 2, "cum_param_bytes": 3, "boundary_bytes": 5}
    more = {**state, "antichain": ["b", "c"], "cum_bwd_ms": 5}
    data = {"schema": "dapple-profile/1", "model": "m", "profile_batch_size": 8, "chain": [layer]}
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**data, "authors_states": [state, more]}))
    assert read(path) == Chain("m", 8, (Layer("a", 0.001, 0.002, 3, 4, 5),), ideal_shares=True)
    assert read(path, states=True).layers[1] == Layer("b, c", 0.0, 0.003, 0, 5, 5)


@with_figures
@pytest.mark.parametrize("name", ["vgg-19-pbs-32", "gnmt-16-pbs-64", "bert-48-pbs-2", "xlnet-36-pbs-1"])
def test_the_profiles_are_chains(name):
    from benchmarks.paper_data import profile_path

    check(read(profile_path(name)))


@with_figures
def test_table_v():
    """All 18 plans, and the cut of those with two stages at most a layer off."""
    rows = list(table_v())
    assert [row.ours for row in rows] == [row.paper for row in rows]
    splits = [(row.split, row.paper_split) for row in rows if row.paper_split is not None]
    assert len(splits) == 9
    assert all(ours is not None and abs(ours - paper) <= 1 for ours, paper in splits)
    assert sum(ours == paper for ours, paper in splits) >= 5


@with_figures
@pytest.mark.parametrize(
    ("model", "profile", "micro_batch", "devices"),
    [
        ("VGG-19", "vgg-19-pbs-32", 32, [14, 2]),
        ("AmoebaNet-36", "amoeba-36-pbs-1", 1, [8, 8]),
        ("BERT-Large", "bert-24-pbs-6", 6, [8, 8]),
        ("XLNet-36", "xlnet-36-pbs-1", 1, [8, 8]),
    ],
)
def test_table_vii(model, profile, micro_batch, devices):
    """The best pipeline has the devices and the cut of the paper, which for BERT-Large is told with words after it."""
    chain = states(profile)
    row = next(
        row for row in expected()["table_VII"] if row["model"].split(" ")[0] in chain.model or "24" in chain.model
    )
    if "24" in chain.model:
        row = next(row for row in expected()["table_VII"] if row["model"] == model)
    found = best(Job(chain, CONFIGURATIONS["A"], row["gbs"], micro_batch))
    assert found.stages[0].end == int(str(row["authors_state_split"]).split()[0])
    assert [sum(stage.counts) for stage in found.stages] == devices


def test_placements_that_give_up():
    assert pure_placements((2, 8), (1, 0), 4) == [(0, 4), (1, 3)]
    assert pure_placements((4, 2), (1, 0), 4) == [(2, 2)]  # by scattering alone
