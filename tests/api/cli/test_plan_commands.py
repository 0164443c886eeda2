"""The commands for plans, from a model's file to pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

import fxpipe
from fxpipe.api.cli.main import main
from fxpipe.ir.cluster.cluster import Cluster, dump
from fxpipe.pipe.results.planned import load

MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), (torch.zeros(8, 64),)

def bare():
    return nn.Linear(4, 4)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "two.json").write_text(dump(Cluster.of(["cpu:0", "cpu:1"])))
    return tmp_path


def run(*arguments: str) -> int:
    return main([str(argument) for argument in arguments])


def test_plan_simulate_compare(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make = ("plan", "model.py:make", "--cluster", "two.json", "--batch", "32")
    assert run(*make, "--out", "best.json", "--time-limit", "2", "--meta", "--explain") == 0
    assert "what if" in capsys.readouterr().out
    assert (
        run(*make, "--out", "gpipe.json", "--planner", "straight", "--schedule", "gpipe", "--micro-batches", "4") == 0
    )
    out = capsys.readouterr().out
    assert "Sequential: straight on 2 of 2 devices, 4 micro-batches of 8, gpipe" in out
    assert "the plan: gpipe.json" in out

    assert run("simulate", "gpipe.json", "--draw", "a.svg", "--trace", "a.json") == 0
    out = capsys.readouterr().out
    assert "░ forward" in out
    assert "peak memory" in out
    assert out.count("gpipe: ") == 1, "the figures of the step, once"
    assert (here / "a.svg").read_text().startswith("<svg")
    assert json.loads((here / "a.json").read_text())["traceEvents"]
    assert run("simulate", "gpipe.json", "--schedule", "zb-h1", "--draw", "b.html") == 0
    assert "<title>zb-h1</title>" in (here / "b.html").read_text()
    assert "zb-h1" in capsys.readouterr().out

    assert run("compare", "best.json", "gpipe.json", "--draw", "c.svg") == 0
    assert "gpipe.json: step" in (here / "c.svg").read_text()
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[2:4]] == ["best.json", "gpipe.json"]

    assert run("plan", "model.py:make", "--cluster", "h100:2", "--batch", "8", "--out", "far.json") == 0
    assert run("show", "model.py:make", "--plan", "far.json") == 2
    assert "say which devices of this machine stand for them, as in --devices " in capsys.readouterr().err

    pipe = fxpipe.compile(nn.Sequential(), plan="gpipe.json")
    assert [stage.device for stage in pipe.options.plan.stages] == ["cpu:0", "cpu:1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plan", "model.py:bare", "--cluster", "A", "--batch", "8"), "returned no inputs"),
        (
            ("plan", "model.py:make", "--cluster", "Z", "--batch", "8"),
            "fxpipe: there is no cluster 'Z'; there are A, B, C",
        ),
        (("plan", "model.py:make", "--cluster", "no.json", "--batch", "8"), "no cluster can be read from 'no.json'"),
        (("plan", "model.py:make", "--cluster", "A", "--batch", "0"), "argument --batch: '0': write a whole number"),
        (("plan", "model.py:make", "--clutser", "A", "--batch", "8"), "no option '--clutser' here; did you mean '--cl"),
        (("simulate", "no.json"), "no plan to look at in 'no.json'"),
        (("compare", "two.json"), "no plan to look at in 'two.json'"),
    ],
)
def test_refusals(here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str) -> None:
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("fxpipe")
    assert says in err


def test_options_of_the_function(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make = (
        "plan",
        "model.py:make",
        "--cluster",
        "h100:2",
        "--batch",
        "32",
        "--planner",
        "straight",
        "--micro-batches",
        "4",
    )
    more = ("--dtype", "bf16", "--parameter-copies", "8", "--all-reduce", "overlap", "--optimizer-sharding", "zero1")
    assert run(*make, *more, "--recompute", "--out", "plan.json") == 0
    assert "MFU" in capsys.readouterr().out
    found = load("plan.json")
    assert (found.copies, found.layers.all_reduce, found.work.flops[0][0]) == (8, "overlap", "bf16")
    assert found.plan.optimizer_sharding == found.layers.optimizer_sharding == "zero1"
    assert all(stage.recompute for stage in found.layers.stages)
    assert run(*make, "--no-recompute", "--out", "plan.json") == 0
    assert not any(stage.recompute for stage in load("plan.json").layers.stages)
