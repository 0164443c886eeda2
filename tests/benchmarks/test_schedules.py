"""The table of schedules: every published figure is met, and what is not published is not claimed."""

from __future__ import annotations

from benchmarks.schedules import HEADERS, PUBLISHED, SIZES, line, rows
from fxpipe.schedules.make_schedule import SCHEDULES


def test_every_schedule_that_trains_is_in_the_table() -> None:
    assert set(PUBLISHED) == set(SCHEDULES) - {"forward-only"}


def test_every_published_figure_is_met() -> None:
    lines = list(rows())
    assert len(lines) == len(PUBLISHED) * len(SIZES)
    assert {len(each) for each in lines} == {len(HEADERS)}
    for each in lines:
        assert each[8] == each[11]
        assert each[8] == ("same" if PUBLISHED[str(each[0])].said(int(str(each[1])), int(str(each[2]))) else "not said")


def test_a_line() -> None:
    assert line("dualpipe-v", 4, 16)[3:] == (
        "0.0303", 3, 3, 6, "2(n-1) = 6", "same", 9, "2n+1 = 9", "same",
    )  # fmt: skip
    assert line("zb-v", 4, 4)[4:9] == (6, 6, "", "0 = 0", "not said")
