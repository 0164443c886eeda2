"""The benchmark of the simulator: it says what it should, at sizes that say nothing about time."""

from __future__ import annotations

import pytest

from benchmarks import simulator_accuracy
from benchmarks.simulator_accuracy import PLANS, SETTINGS, Result, Setting, table, trials, verdict
from tests.helpers.marks import mostly_slow

SMALL = {
    "mlp": lambda: simulator_accuracy.mlp(width=8, depth=8, rows=16),
    "resnet": lambda: simulator_accuracy.resnet(width=2, size=32, rows=16),
    "unet": lambda: simulator_accuracy.unet(channels=4, size=8, rows=16),
    "transformer": lambda: simulator_accuracy.transformer(width=8, length=4, rows=16),
}
INTERLEAVED, UNEVEN = SETTINGS[5], SETTINGS[7]


@pytest.mark.parametrize("model", mostly_slow(SMALL, lambda model: model == "mlp", every=3))
def test_rehearsals_and_steps_of_every_model(model: str) -> None:
    assert set(SMALL) == set(simulator_accuracy.cases())
    results = trials(SMALL[model](), (INTERLEAVED, UNEVEN), rounds=2)
    for one in results:
        assert min(*one.workers, *one.step) > 0
        assert one.step[0] > one.workers[0], "the call takes longer than the workers"
        assert "cpu:1 busy" in one.spans


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_plans(model: str) -> None:
    for one in trials(SMALL[model](), PLANS, rounds=1):
        assert min(*one.workers, *one.step) > 0


def test_there_are_enough_pairs_for_each_model() -> None:
    assert min(len(SETTINGS), len(PLANS)) * len(SMALL) >= 12
    assert {one.schedule for one in SETTINGS} == {"gpipe", "1f1b", "zb-h1", "interleaved"}
    assert {one.checkpoint for one in SETTINGS} == {"never", "always"}
    assert {one.chunks for one in SETTINGS} == {4, 8}
    assert {one.cut for one in SETTINGS} == {"even", "uneven"}


def results(*measured: float) -> list[Result]:
    """Predicted are 100, 110 and 120 ms."""
    made = []
    for k, seconds in enumerate(measured):
        setting = Setting("even", "gpipe", "never", 4 + k)
        made.append(Result(setting, (0.09, 0.1), [(0.1 + 0.01 * k, seconds)]))
    return made


def test_the_table() -> None:
    lines = table(results(0.08, 0.11)).splitlines()
    assert lines[-2].split() == ["even", "gpipe", "never", "4", "90.0", "100.0", "-10.0%", "100.0", "80.0", "+25.0%"]
    assert lines[-1].split()[-3:] == ["110.0", "110.0", "+0.0%"]


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ((0.1, 0.11, 0.12), "even gpipe, never, 4, measured the fastest: good"),
        ((0.102, 0.1, 0.12), "even gpipe, never, 4, measured 2.0% behind the fastest, even gpipe, never, 5: good"),
        ((0.11, 0.1, 0.12), "even gpipe, never, 4, measured 10.0% behind the fastest, even gpipe, never, 5: not good"),
    ],
)
def test_the_verdict_on_the_choice(measured: tuple[float, ...], expected: str) -> None:
    errors, _, choice = verdict(results(*measured))
    assert choice == f"simulated as fastest: {expected}"
    assert errors.startswith("3 of 3 within 15%")


def test_the_verdict_on_the_errors() -> None:
    errors, order, _ = verdict(results(0.12, 0.1, 0.125))
    assert errors == "2 of 3 within 15%; the worst is -16.7%"
    assert order == "order kept by 1 of 2 pairs that differ by more than 10%"
