"""Speed-ups of the DAPPLE paper's figures, where its tables and profiles are at hand."""

from __future__ import annotations

import pytest

from benchmarks.dapple import TABLE_V
from benchmarks.dapple_speedups import HEADS, HEADS_13, compared, data_parallel, figure_13, figure_14, profile
from benchmarks.paper_data import MISSING, folder
from fxpipe.ir.cluster.published_clusters import preset

pytestmark = pytest.mark.skipif(folder() is None, reason=MISSING)
VGG = next(case for case in TABLE_V if case.model == "VGG-19")


def test_data_parallelism_is_as_table_v_chooses() -> None:
    row = dict(zip(HEADS, compared(VGG, "A", preset("A"), VGG.batch, 0.1), strict=True))
    assert (row["paper's choice"], row["our choice"]) == ("DP", "DP")
    assert row["data par."] < row["overlapped"] < 16
    assert row["ours"] >= row["DAPPLE"]


def test_a_model_that_does_not_fit_has_no_data_parallelism() -> None:
    amoebanet = TABLE_V[-1]
    assert data_parallel(amoebanet, profile(amoebanet.profile), preset("A"), 128, "end") is None


def test_more_devices_are_faster() -> None:
    speedups = [row[8] for row in figure_14(["VGG-19"], (2, 4), 0.1)]
    assert 1 < speedups[0] < speedups[1] < 4


@pytest.mark.slow
def test_dapples_published_plan_for_vgg_beats_pipedreams() -> None:
    row = dict(zip(HEADS_13, next(figure_13((2,), 0.5)), strict=True))
    assert row["model"] == "VGG-19"
    assert row["faster"] > 3
