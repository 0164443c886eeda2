"""Published runs on A100: the share of the peak from the first one, the others predicted."""

from __future__ import annotations

import pytest

from benchmarks.megatron import (
    calibrated,
    cluster_of,
    costs,
    planned,
    predict,
    profiled,
    reaching,
    runs,
    teraflops,
    the_same,
    with_update,
)
from benchmarks.paper_data import MISSING, folder
from fxpipe.ir.cluster.published_clusters import A100, A100_REACHES
from fxpipe.profiling.estimate import model_products

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(folder() is None or not (folder() / "megatron.md").is_file(), reason=MISSING),
]


def test_all_rows_are_within_a_fifth() -> None:
    table = runs()
    assert len(table) == 10
    share = calibrated(table[0])
    assert share == pytest.approx(A100_REACHES, abs=0.005)  # what the preset says
    device = reaching(share)
    for run in table:
        assert teraflops(run, predict(run, device).seconds) == pytest.approx(run.teraflops, rel=0.2), run


def test_what_a_gpu_computes_is_what_the_formula_counts() -> None:
    """A step is three forwards, and one more by recomputation: 4 x 2 x 12 h^2 operations of a layer, and attention."""
    from benchmarks.megatron import captured

    run = runs()[4]
    known = captured(run.hidden, run.heads, run.tensor)
    modules = {op.name: op.origin.module for op in known.graph.ops}
    found = model_products(known.graph, known.sizes)
    layer = sum(one.forward for name, one in found.items() if modules[name].startswith("second")) / known.batch
    whole = run.batch * run.layers * 4 * layer * run.tensor
    head = run.flops * (1 - 1 / (1 + 51200 / (16 * run.layers * run.hidden)))
    assert whole == pytest.approx(run.flops - head, rel=0.01)
    assert costs(run, 1, A100).layer.parameters == pytest.approx(2 * 12 * run.hidden**2 / run.tensor, rel=0.01)


def test_a_plan_is_not_predicted_slower() -> None:
    """Row 2: layers cut over 2 GPUs. Their configuration takes as long by the planner's costs as it was predicted, and
    the plan of one size of micro-batch is faster."""
    table = runs()
    run, device = table[1], reaching(calibrated(table[0]))
    best, cluster = predict(run, device), cluster_of(run, device)
    known = profiled(run, cluster.devices[0])
    same = the_same(run, known, cluster, best.samples)
    assert with_update(same, device) == pytest.approx(best.seconds, rel=0.05)
    ours = planned(run, known, cluster, micro_batches=16, time_limit=4.0)
    assert with_update(ours, device) <= best.seconds
    assert [one.size for one in ours.tried] == [1, 2, 4, 8]
