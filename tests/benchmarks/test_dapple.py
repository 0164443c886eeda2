"""The tables of the DAPPLE paper, where its figures are at hand."""

from __future__ import annotations

import pytest

from benchmarks import dapple
from benchmarks.paper_data import MISSING, folder


def test_says_where_figures_are_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("FXPIPE_PAPER_DATA", str(tmp_path))
    dapple.main()
    assert capsys.readouterr().out == MISSING + "\n"


@pytest.mark.skipif(folder() is None, reason=MISSING)
def test_dapples_plans_beat_pipedreams():
    results = {result.model: result for result in dapple.table_vii()}
    assert [result.split for result in results.values()] == [result.paper_split for result in results.values()]
    assert all(result.published > result.dapple for result in results.values())
    assert results["VGG-19"].published > 3 * results["VGG-19"].dapple


@pytest.mark.skipif(folder() is None, reason=MISSING)
def test_the_late_warmup_gains_as_table_iv_orders():
    gains = [(paper, ours) for *_, paper, ours in dapple.table_iv() if _[:2] != ["GNMT-16", "A"]]
    assert all(ours >= 1 for _, ours in gains)
    assert sorted(gains) == sorted(gains, key=lambda gain: gain[1])
