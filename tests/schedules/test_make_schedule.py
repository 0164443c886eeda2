"""Schedules by name: where their stages stand, what rows they get, what is refused and what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule_measures import bubble, peak_live
from fxpipe.ir.schedule.schedule import Schedule, dump_csv, parse
from fxpipe.ir.schedule.schedule_check import check
from fxpipe.ir.schedule.sub_schedule import only
from fxpipe.schedules.interleaved import interleaved
from fxpipe.schedules.make_schedule import SCHEDULES, make, placement
from fxpipe.schedules.one_f_one_b import early, gpipe, one_f_one_b

NAMES = sorted(SCHEDULES)


def labels(n: int) -> tuple[str, ...]:
    return tuple(f"cuda:{d}" for d in range(n))


def test_placement() -> None:
    a, b, c = devices = ("a", "b", "c")
    assert placement("1f1b", devices) == (a, b, c)
    assert placement("interleaved", devices) == (a, b, c, a, b, c)
    assert placement("looped-bfs", devices, stages_per_device=3) == (a, b, c) * 3
    assert placement("zb-v", devices) == placement("dualpipe-v", devices, 2) == (a, b, c, c, b, a)
    assert placement("gpipe", (a, a, b)) == (a, a, b)


@given(name=st.sampled_from(NAMES), n=st.integers(1, 8), chunks=st.integers(1, 24), fewer=st.integers(1, 24))
@settings(max_examples=60, deadline=None)
def test_every_name_runs_where_it_is_placed(name: str, n: int, chunks: int, fewer: int) -> None:
    stage_devices = placement(name, labels(n))
    schedule = make(name, stage_devices, chunks)
    check(schedule)
    assert (schedule.num_stages, schedule.chunks) == (len(stage_devices), chunks)
    assert [{stage_devices[s] for s in row} for row in schedule.stages] == [{label} for label in labels(n)]
    small = only(schedule, fewer)
    check(small)
    assert small.chunks == min(chunks, fewer)


@given(data=st.data(), chunks=st.integers(1, 24))
@settings(max_examples=40, deadline=None)
def test_straight_schedules_run_on_any_devices(data: st.DataObject, chunks: int) -> None:
    name = data.draw(st.sampled_from([name for name in NAMES if SCHEDULES[name].shape in ("straight", "any")]))
    stage_devices = data.draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9))
    schedule = make(name, stage_devices, chunks)
    check(schedule)
    rows = [tuple(s for s, at in enumerate(stage_devices) if at == label) for label in dict.fromkeys(stage_devices)]
    assert list(schedule.stages) == rows


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, 17))
def test_every_size(n: int) -> None:
    for name in NAMES:
        for chunks in (*range(1, 21), 31, 32, 33, 64):
            schedule = make(name, placement(name, labels(n)), chunks)
            check(schedule)
            if name in ("gpipe", "1f1b"):
                assert round(bubble(schedule), 4) == round((n - 1) / (chunks + n - 1), 4)
            if name == "1f1b":
                assert all(live <= k for live, k in zip(peak_live(schedule), early(n), strict=True))


def test_names_are_the_schedules_own() -> None:
    for name in NAMES:
        made = make(name, placement(name, ("a", "b")), 3)
        assert made.name == name.replace("forward-", "forward ")


def test_warmup_and_limit() -> None:
    assert make("1f1b", labels(3), 8, warmup=(5, 3, 1)).devices == make("1f1b-late", labels(3), 8).devices
    assert peak_live(make("1f1b-late", labels(4), 16)) == (7, 5, 3, 1)
    assert peak_live(make("1f1b-late", labels(4), 16, limit=4)) == (4, 4, 3, 1)
    assert peak_live(make("1f1b", labels(4), 16, limit=2)) == (2, 2, 2, 1)


def test_ones_own() -> None:
    by_hand = parse("F0 F1 B0 B1 \n F0 B0 F1 B1")
    for own in (by_hand, str(by_hand), dump_csv(by_hand), "F0 F1 B0 B1 \n F0 B0 F1 B1", lambda s, m: str(by_hand)):
        assert make(own, ("a", "b"), 2).devices == by_hand.devices  # type: ignore[arg-type]
    assert make(one_f_one_b, ("a", "b"), 2) == one_f_one_b(2, 2)
    assert make("F0 B0", ("a",), 1) == parse("F0 B0")


def test_ones_own_on_shared_devices() -> None:
    assert make(gpipe, ("a", "b", "a"), 2).stages == ((0, 2), (1,))
    rows = interleaved(4, 4, devices=2)
    assert make(rows, ("a", "b", "a", "b"), 4) == rows
    backwards = Schedule("turned", rows.devices[::-1])
    assert make(backwards, ("a", "b", "a", "b"), 4).devices == rows.devices


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpip", "ab", 2), "there is no schedule 'gpip'; write one of gpipe, 1f1b, .*, or a grid such as"),
        (
            ("zb-v", "abcd", 2),
            "zb-v has its stages in a V, here as a, b, c, d, d, c, b, a, but the stages are on a, b, ",
        ),
        (("interleaved", "abba", 2), "deals its stages to the devices in turn, here as a, b, a, b, but the stages are"),
        (("gpipe", "", 2), "at least one stage"),
        (("gpipe", "ab", 0), "chunks is 0"),
        (("gpipe", "ab", 4, (2, 1)), "warmup is for schedule='1f1b' and '1f1b-late', and schedule is 'gpipe'"),
        (("1f1b", "ab", 4, (2, 1), 3), "write one of them"),
        (("1f1b", "ab", 4, None, 0), "limit is 0"),
        (("F0 B0\nF0 B0", "abc", 1), "'by hand' is for 2 stages, and the pipe has 3; write one for 3"),
        (("F0 B0\nF0 B0", "ab", 2), "'by hand' is for 1 micro-batches, and the pipe has 2; .* or chunks=1"),
        (("F0 B0\nB0 F0", "ab", 1), "the schedule 'by hand' cannot run"),
        (("0F0 1F0 1B0 0B0\n2F0 2B0", "abc", 1), r"no row for a, which runs the stages \[0\]; its rows are of"),
    ],
)
def test_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpip", "ab"), "there is no schedule 'gpip'"),
        (("gpipe", ""), "gpipe has no devices"),
        (("zb-v", "aab"), "name each of .* once"),
        (("zb-v", "ab", 3), "zb-v has two stages on each device, not 3"),
        (("gpipe", "ab", 2), "gpipe has one stage on each device, not 2; write schedule='interleaved'"),
        (("interleaved", "ab", 0), "stages_per_device is 0"),
    ],
)
def test_placement_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placement(*arguments)
