"""The fastest that fits."""

from __future__ import annotations

from random import Random

import pytest

from fxpipe.ir.timeline import Span, Timeline, even
from fxpipe.schedules.auto_schedule import Candidate, auto
from fxpipe.schedules.make_schedule import make, placement
from fxpipe.schedules.simulate.simulate import StageCost, simulate

DEVICES = ("a", "b", "c", "d")
NAMES = ("gpipe", "1f1b", "1f1b-late", "zb-h1", "zb-h2")


def candidates(chunks: int, saved: int = 1000, names: tuple[str, ...] = NAMES) -> list[Candidate]:
    """Simulated with stages that are alike."""
    pairs = []
    for name in names:
        schedule = make(name, placement(name, DEVICES), chunks)
        costs = [StageCost(1, 2, saved=saved)] * schedule.num_stages
        pairs.append((schedule, simulate(schedule, costs, devices=DEVICES)))
    return pairs


def picked(pairs: list[Candidate], memory: dict[str, int] | None = None) -> str:
    return auto(pairs, memory)[0].name


def test_fastest() -> None:
    assert picked(candidates(chunks=8)) == "zb-h1"  # as fast as zb-h2, whole step, and before it by name
    assert picked(candidates(chunks=8, names=("gpipe", "1f1b-late", "1f1b"))) == "1f1b"


def test_the_order_of_candidates_does_not_matter() -> None:
    pairs = candidates(chunks=6)
    for seed in range(5):
        Random(seed).shuffle(pairs)
        assert picked(pairs) == "zb-h1"


def test_within_memory() -> None:
    pairs = candidates(chunks=8)
    assert picked(pairs, dict.fromkeys(DEVICES, 4000)) == "zb-h1"
    assert picked(pairs, {"d": 1000}) == "1f1b"  # the last device keeps one micro-batch there, and four in zb-h1
    assert picked(pairs, {"b": 8000}) == "zb-h1"


def test_none_fits() -> None:
    with pytest.raises(ValueError, match="no schedule fits into memory") as error:
        auto(candidates(chunks=8, names=("gpipe", "1f1b")), {"a": 2000})
    assert str(error.value).splitlines()[1:] == [
        "  1f1b: a needs 4 kB and has 2 kB",
        "  gpipe: a needs 8 kB and has 2 kB",
    ]


def test_times_that_differ_by_rounding_are_alike() -> None:
    gpipe, early = (make(name, "ab", 2) for name in ("gpipe", "1f1b"))
    slower = Timeline("1f1b", ("a",), (Span("a", 0, 0.1 + 0.2, "F", 0, 0),))
    assert slower.makespan > 0.3
    assert picked([(gpipe, Timeline("gpipe", ("a",), (Span("a", 0, 0.3, "F", 0, 0),))), (early, slower)]) == "1f1b"


def test_nothing_to_pick_from() -> None:
    with pytest.raises(ValueError, match="there are no schedules"):
        auto([])
    gpipe = make("gpipe", "ab", 2)
    with pytest.raises(ValueError, match="'gpipe' says nothing about memory"):
        auto([(gpipe, even(gpipe))], {"a": 1})
