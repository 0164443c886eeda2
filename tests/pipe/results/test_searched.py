"""Strategies of models, from the model to the file and the pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fxpipe.api.cli.main import main
from fxpipe.api.hardware_alternatives import explain
from fxpipe.api.search import search
from fxpipe.errors import PlanError
from fxpipe.ir.cluster.published_clusters import preset
from fxpipe.ir.operators.strategy import Config
from fxpipe.pipe.results.searched import Searched, load, parse
from fxpipe.pipe.results.strategy_table import LEGEND, table
from fxpipe.planning.operators.expert_strategies import data_parallel, krizhevsky
from fxpipe.planning.operators.models.convolutional_networks import alexnet
from fxpipe.planning.operators.models.recurrent_networks import rnnlm

MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), (torch.zeros(8, 64),)

class Strange(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x).abs()

def strange():
    return Strange(), (torch.zeros(8, 64),)
"""
FOUR = preset("p100:4")


@pytest.mark.slow
def test_it_is_never_slower_than_data_parallelism() -> None:
    found = search(alexnet(32), FOUR, budget=1)
    assert 0 < found.seconds <= found.data_parallel.seconds
    assert sum(found.timeline.busy) <= 4 * found.seconds


def test_the_compiled_core_says_the_same_as_plain_python() -> None:
    graph = rnnlm(8, 3, vocab=11, width=8)
    found = Searched(graph, FOUR, data_parallel(graph, 4).replace(3, Config((2, 2), (0, 0, 3, 1))))
    assert found.seconds == pytest.approx(found.timeline.makespan, rel=1e-12)


def test_what_other_hardware_would_be_worth() -> None:
    graph = rnnlm(8, 3, vocab=11, width=8)
    found = Searched(graph, FOUR, data_parallel(graph, 4))
    text = explain(found, budget=0.2)
    server, bandwidth = text.splitlines()[-2:]
    assert server == "one more server      " + server[21:]
    assert server.endswith("nothing joins 'server 0' to other servers")
    assert bandwidth.startswith("twice the bandwidth  ")
    assert bandwidth.count("-") == 2  # as it is, and more so when searched again


def test_what_is_transferred() -> None:
    """By data parallelism, each weight goes around the ring: 2 (4 - 1) times its 4 bytes, from all four together."""
    graph = alexnet(32)
    found = Searched(graph, FOUR, data_parallel(graph, 4))
    assert found.transferred == pytest.approx(6 * 4 * graph.weights)
    assert Searched(graph, FOUR, krizhevsky(graph, 4)).transferred < found.transferred


def test_only_what_fits_in_memory() -> None:
    """Two layers of 4.3 GB, four times with gradients and Adam's moments, on devices of 12 GB."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(32768, 32768), nn.Linear(32768, 32768)), torch.zeros(8, 32768)
    found = search(model, "k80:4", example_inputs=x, budget=1)
    assert found.fits
    assert max(found.memory.values()) <= 12e9
    assert not found.data_parallel.fits
    assert "too much" in str(found)
    assert parse(found.dump()) == found
    with pytest.raises(PlanError, match=r"no strategy for Sequential was found that fits in memory.* which has 12 GB"):
        search(model, "k80:2", example_inputs=x, budget=1)
    assert search(model, "k80:2", example_inputs=x, budget=1, parameter_copies=2).fits


def test_a_file() -> None:
    found = search(rnnlm(8, 3, vocab=11, width=8), FOUR, budget=1)
    assert parse(found.dump()) == found
    with pytest.raises(ValueError, match="graph is missing: write an object"):
        parse("{}")


def test_steps_that_are_cut_alike_are_one_row() -> None:
    graph = rnnlm(8, 3, vocab=11, width=8)
    plain = data_parallel(graph, 4)
    at = graph.positions["lstm1.1"]
    assert table(zip(graph, plain.replace(at, Config((2, 2), (0, 0, 3, 1))).configs, strict=True)).splitlines() == [
        "operator              kind               S    A    P    devices",
        "embed.0 and 2 more    embedding          4              0-3",
        "lstm0.0 and 2 more    lstm               4              0-3",
        "lstm1.0 and 1 more    lstm               4              0-3",
        "lstm1.1               lstm               2         2    0 0 3 1",
        "softmax.0 and 2 more  projected_softmax  4              0-3",
        LEGEND,
    ]


def test_dimensions_are_named_where_there_are_several() -> None:
    graph = alexnet(8, width=2, hidden=16, size=63)
    configs = list(data_parallel(graph, 4).configs)
    configs[graph.positions["conv2"]] = Config((1, 2, 2, 1), (0, 1, 2, 3))
    rows = {line.split()[0]: line.split() for line in table(zip(graph, configs, strict=True)).splitlines()}
    assert rows["conv2"] == ["conv2", "conv2d", "height/2", "2", "0-3"]
    assert rows["fc6"] == ["fc6", "linear", "4", "0-3"]


def test_a_model() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    found = search(model, FOUR, example_inputs=torch.zeros(8, 6), batch_size=32, budget=1)
    assert [operator.sizes for operator in found.graph] == [(32, 6), (32, 6), (32, 2)]
    with pytest.raises(PlanError, match="say which, as in example_inputs"):
        search(model, FOUR)
    with pytest.raises(PlanError, match="cluster is 'Z': write 'A'"):
        search(model, "Z")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def test_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--out", "strategy.json", "--draw", "strategy.svg", "--timeline", "step.svg")
    assert (
        main(["search", "model.py:make", "--cluster", "p100:4", "--batch", "32", "--meta", "--budget", "1", *files])
        == 0
    )
    out = capsys.readouterr().out
    assert "a step on 4 devices" in out
    assert "transferred" in out
    assert "strategies tried" in out
    found = load("strategy.json")
    assert found.graph.operator("0").sizes == (32, 64)
    assert all((here / name).read_text().startswith("<svg") for name in ("strategy.svg", "step.svg"))
    assert main(["search", "alexnet", "--cluster", "k80:2", "--batch", "16", "--budget", "1"]) == 0
    assert capsys.readouterr().out.startswith("AlexNet: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("model.py:strange", "--cluster", "p100:4"), "model.py:10  return torch.fft.fft(x).abs(): 'fft_fft' is no"),
        (("model.py:make", "--cluster", "p100:0"), "'0' is no number of devices: write p100:8"),
        (("nmt", "--cluster", "p100:4", "--batch", "0"), "argument --batch: '0': write a whole number"),
        (
            ("model.py:make", "--cluster", "p100:4", "--budget", "0"),
            "argument --budget: '0': write a number of seconds above 0",
        ),
        (("missing.py:make", "--cluster", "p100:4"), "there is no file 'missing.py'"),
    ],
)
def test_refusals(here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str) -> None:
    assert main(["search", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("fxpipe")
    assert says in err


def test_no_strategy_in_a_file(here: Path) -> None:
    (here / "other.json").write_text("[]")
    for name in ("other.json", "none.json"):
        with pytest.raises(PlanError, match="no strategy to look at"):
            load(name)
