"""The schedule of segments runs if that of their stages does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.schedule.schedule_check import check
from fxpipe.schedules.make_schedule import make
from fxpipe.schedules.stage_segments import segmented
from tests.helpers.marks import mostly_slow


@st.composite
def segments(draw: st.DrawFn) -> tuple[list[int], list[str], list[tuple[int, ...]]]:
    """Stages of one to three devices each, a few segments on them, and from which others each one takes: all earlier,
    and one of the stage before."""
    stages, devices, sources = list[int](), list[str](), list[tuple[int, ...]]()
    before: Sequence[int] = ()
    for stage in range(draw(st.integers(1, 4))):
        width = draw(st.integers(1, 3))
        count = draw(st.integers(width, 7))
        own = range(len(stages), len(stages) + count)
        for at, segment in enumerate(own):
            stages.append(stage)
            devices.append(f"{stage}.{at if at < width else draw(st.integers(0, width - 1))}")
            found = draw(st.sets(st.sampled_from(range(segment)), max_size=3)) if segment else set()
            sources.append(tuple(sorted(found | ({draw(st.sampled_from(before))} if before else set()))))
        before = own
    return stages, devices, sources


@pytest.mark.parametrize(
    "name", mostly_slow(["gpipe", "1f1b", "zb-h1", "forward-only"], ("zb-h1", "forward-only").__contains__)
)
@given(made=segments(), chunks=st.integers(1, 6))
def test_it_runs(name: str, made: tuple[list[int], list[str], list[tuple[int, ...]]], chunks: int) -> None:
    stages, devices, sources = made
    first = dict(reversed([*zip(stages, devices, strict=True)]))
    coarse: Schedule = make(name, [first[stage] for stage in range(max(stages) + 1)], chunks)
    check(segmented(coarse, stages, devices, sources))
