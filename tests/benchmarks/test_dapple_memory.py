"""The memory tables of the DAPPLE paper, where its figures are at hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.dapple_memory import COPIES, GB, ROOM, SAMPLES, bert, deepest, depth, step, straight, table_vi
from benchmarks.paper_data import MISSING, folder
from fxpipe.planning.hybrid.event_time import event_time, fits

pytestmark = pytest.mark.skipif(folder() is None, reason=MISSING)


def test_memory_is_the_papers_without_recomputation() -> None:
    """GPipe's grows with the micro-batches, DAPPLE's does not."""
    rows = {(row[0], row[1]): row for row in table_vi()}
    for name, m in (("GPipe", 2), ("DAPPLE", 2), ("DAPPLE", 8), ("DAPPLE", 16), ("DAPPLE+RC", 16)):
        row = rows[name, m]
        assert row[7] == pytest.approx(float(str(row[6])), rel=0.03)
    assert rows["GPipe", 3][8] > rows["DAPPLE", 16][8]


def test_bert_has_its_layers() -> None:
    two, four = bert(2), bert(4, samples=1)
    assert (len(two), len(four)) == (5, 7)
    assert two.saved[-1] == pytest.approx(2 * SAMPLES * 3.473e9 / 48)
    assert bert(48).parameters[-1] == pytest.approx(2549805056)
    assert four.layers[5].cut < four.layers[4].cut  # the last one passes no mask on


def test_the_deepest_fits_and_one_more_layer_does_not() -> None:
    problem = deepest(2, samples=2)
    stages = straight(problem)
    capped = replace(problem, capped=True, cluster=room(problem))
    assert fits(capped, stages)
    assert not straight(depth(len(problem.chain) - 2, 2, samples=2))
    # Micro-batches that recompute at once wait for their gradients in the event time, and not in the simulation.
    assert step(problem, stages, "1f1b").makespan == pytest.approx(event_time(problem, stages), rel=0.01)
    assert max(step(problem, stages, "1f1b").high_water) <= ROOM
    assert COPIES * problem.chain.parameters[-1] > 20 * GB


def room(problem):
    """The cluster with devices of 16 GiB."""
    cluster = problem.cluster
    return replace(cluster, devices=tuple(replace(device, memory=ROOM) for device in cluster.devices))
