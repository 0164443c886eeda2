"""Bars in the terminal, as pictures."""

from __future__ import annotations

import re
from textwrap import dedent

from hypothesis import given, settings
from hypothesis import strategies as st

from fxpipe.ir.schedule.schedule import parse
from fxpipe.ir.timeline import Timeline
from fxpipe.schedules.one_f_one_b import gpipe, one_f_one_b
from fxpipe.schedules.simulate.simulate import Hop, StageCost, simulate
from fxpipe.viz.text_timeline import ASCII, COLOR, UNICODE, Style, bars


def text(picture: str) -> str:
    return dedent(picture).strip()


def test_schedule() -> None:
    assert bars(gpipe(2, 3), width=48) == text("""
        gpipe, bubble 25.0%
        device 0 │0░░░1░░░2░░░            2▓▓▓▓▓▓▓1▓▓▓▓▓▓▓0▓▓▓▓▓▓▓│ 75%
        device 1 │    0░░░1░░░2░░░2▓▓▓▓▓▓▓1▓▓▓▓▓▓▓0▓▓▓▓▓▓▓        │ 75%
        ░ forward  ▓ backward    the number is the micro-batch
    """)


def test_timeline() -> None:
    costs = [StageCost(0.001, 0.002, checkpoint="always")] * 2
    timeline = simulate(one_f_one_b(2, 2), costs, [Hop(0, 1, 0.001, 0.001)], devices=("cpu:0", "cpu:1"))
    assert bars(timeline, width=52, style=ASCII) == text("""
        1f1b: 13 ms, bubble 38.5%
        cpu:0 |0---1---0~~~                0=======1~~~    1=======| 62%
        cpu:1 |        0---0~~~0=======1---1~~~1=======            | 62%
               0 s                                            13 ms
        - forward  = backward  ~ recompute    the number is the micro-batch
    """)


def test_halves_of_backward_look_different() -> None:
    split = parse("F0 F1 . I0 W0 I1 W1 \n . F0 I0 F1 I1 W0 W1", name="split")
    assert bars(split, width=14).splitlines()[1] == "device 0 │0░1░  0▒0█1▒1█│ 86%"


def test_colors_say_the_same() -> None:
    painted = bars(gpipe(2, 3), width=48, style=COLOR)
    bare = re.sub(r"\x1b\[[0-9;]*m", "", painted)
    assert re.findall(r"\d", bare.splitlines()[1]) == re.findall(r"\d", bars(gpipe(2, 3), width=48).splitlines()[1])
    assert painted.count("\x1b[0m") == 2 * 6 + 2  # one piece a box, and the legend


STYLES = st.sampled_from([ASCII, UNICODE])


@given(stages=st.integers(1, 8), chunks=st.integers(1, 40), width=st.integers(1, 200), style=STYLES)
@settings(max_examples=60, deadline=None)
def test_rows_line_up(stages: int, chunks: int, width: int, style: Style) -> None:
    """Whatever the width, all bars have it: narrow ones too, where there are more boxes than characters."""
    timeline = simulate(gpipe(stages, chunks), [StageCost(0.3, 0.7)] * stages)
    rows = bars(timeline, width, style).splitlines()[1 : stages + 1]
    edge = style.edges[0]
    assert {len(row.split(edge)[1]) for row in rows} == {width}
    assert {len(row.split(edge)[1]) for row in bars(gpipe(stages, chunks), width, style).splitlines()[1 : stages + 1]}


def test_empty() -> None:
    assert bars(Timeline("nothing", ("a",), ()), width=10).splitlines()[1] == "a │          │ 0%"
