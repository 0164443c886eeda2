"""The benchmark scripts run and print their tables, at sizes that say nothing about speed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import compile_time, first_call, one_gpu, overhead
from benchmarks.timing import in_turn, median_difference
from tests.helpers.marks import mostly_slow


def test_candidates_take_turns() -> None:
    calls: list[str] = []
    seconds = in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2, steps=2)
    assert "".join(calls) == "aabb" + "aabbaabb"
    assert [len(times) for times in seconds.values()] == [2, 2]


def test_differences_are_taken_round_by_round() -> None:
    assert median_difference([2.0, 5.0, 9.0], [1.0, 3.0, 1.0]) == 2.0


def test_every_candidate_runs() -> None:
    for step in overhead.candidates().values():
        step()


def test_overhead_prints_parts_of_torchgpipes() -> None:
    seconds = {
        overhead.PLAIN: [32e-6] * 3,
        "torchgpipe, never": [96e-6] * 3,
        "fxpipe, never": [48e-6, 64e-6, 48e-6],
    }
    assert overhead.table(seconds).splitlines()[2:] == [
        "plain loop                   1.0",
        "torchgpipe, never            3.0         2.0",
        "fxpipe, never                1.5         0.5               0.25",
    ]


def test_first_call_prints_our_part_beside_dynamos() -> None:
    last = first_call.table({12: first_call.First(300, 3.0, 1.5, 0.5, 0.1, ((0.5, 0.2), (0.1, 0.1)))}).splitlines()[-1]
    assert last.split() == [
        "12",
        "300",
        "3.00",
        "1.50",
        "0.50",
        "1.00",
        "0.10",
        "0.90",
        "0.60",
        "10.00",
        "3.00",
        "0.50",
        "(10%)",
        "0.10",
        "(0%)",
    ]


def test_compile_time_prints_growth() -> None:
    seconds = {(100, "capture"): 0.5, (100, "fxpipe"): 1.0, (1000, "capture"): 4.0, (1000, "fxpipe"): 8.0}
    runs = {("chain", ops, route): compile_time.Run(ops, time, {}) for (ops, route), time in seconds.items()}
    last = compile_time.table(runs).splitlines()[-1]
    assert last.split() == ["chain", "1,000", "4.00", "8.00", "2.00", "8.00", "8.0x", "15.0x"]


@pytest.mark.parametrize("kind", mostly_slow(compile_time.MODELS, lambda kind: kind == "chain"))
def test_compile_time_counts_the_same_ops_on_both_routes_and_all_the_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_time, "MODELS", {kind: compile_time.MODELS[kind]})
    runs = compile_time.measure([58], repeats=1)
    alone, pipe = (runs[kind, 58, route] for route in ("capture", "fxpipe"))
    assert alone.ops == pipe.ops
    assert pipe.ops == pytest.approx(58, abs=5)
    assert pipe.phases.keys() == set(compile_time.PHASES)
    assert sum(pipe.phases.values()) == pytest.approx(pipe.seconds, rel=0.05)


def test_one_gpu_says_so_where_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    one_gpu.main([])
    assert capsys.readouterr().out == "There is no GPU here; nothing was measured.\n"


def test_one_gpu_steps_give_the_plain_gradients() -> None:
    layers = [nn.Linear(4, 4) for _ in range(8)]
    case = one_gpu.Case(lambda: nn.Sequential(*layers), lambda: torch.randn(16, 4), one_gpu.mean_square)
    found = one_gpu.candidates(case, "cpu:0")
    for one in found.values():
        one.step()
        assert one_gpu.difference(one.model, found[one_gpu.PLAIN].model) < 1e-6
    assert len(found) > 5


def test_one_gpu_prints_time_and_memory() -> None:
    found = {
        one_gpu.PLAIN: one_gpu.Measured([0.010, 0.012, 0.010], 2_000_000, 1.0, 0.0),
        "fxpipe, never": one_gpu.Measured([0.011, 0.013, 0.011], 1_000_000, 0.926, 2e-8),
    }
    rows = one_gpu.table(found).splitlines()[2:]
    assert [row.split() for row in rows] == [
        ["plain", "loop", "10.00", "2", "MB", "100%"],
        ["fxpipe,", "never", "11.00", "+10.0%", "1", "MB", "93%", "2e-08"],
    ]
