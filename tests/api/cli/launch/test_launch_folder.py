"""`fxpipe plan --launch`: the texts of the folder, and what is refused before a file is written."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fxpipe.api.cli.main import main
from fxpipe.ir.cluster.cluster import Cluster, dump

MODEL = '''
import torch
import torch.nn.functional as F
from torch import nn


class Tokens(nn.Module):
    """Scores of the next token."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        self.head = nn.Linear(8, 11)

    def forward(self, ids, mask):
        return {"scores": self.head(self.layers(self.embed(ids)) * mask[:, :, None])}


class WithLoss(Tokens):
    def forward(self, ids, labels):
        scores = self.head(self.layers(self.embed(ids)))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


def make_model():
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))


def tokens():
    return Tokens(), (torch.zeros(4, 6, dtype=torch.long), torch.ones(4, 6, dtype=torch.bool))


def with_loss():
    ids = torch.zeros(4, 6, dtype=torch.long)
    return WithLoss(), {"ids": ids, "labels": ids}


def counts():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make_model()

        def forward(self, x):
            return self.layers(x).argmax(1)

    return Counts(), (torch.zeros(4, 8),)
'''
Golden = Callable[[str, str], None]
CPUS = ("--cluster", "cpus.json", "--planner", "straight", "--batch", "16", "--time-limit", "2")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "token_nets.py").write_text(MODEL)
    cpus = Cluster.of([f"cpu:{i}" for i in range(4)])
    (tmp_path / "cpus.json").write_text(dump(cpus))
    (tmp_path / "one.json").write_text(dump(Cluster.of(["cpu:0"])))
    (tmp_path / "both.json").write_text(dump(Cluster.of(["cpu:0", "cuda:0"])))
    there = tuple(replace(device, server=f"s{i % 2}") for i, device in enumerate(cpus.devices))
    links = tuple(replace(cpus.links[0], ends=ends) for ends in (("s0", "s0"), ("s0", "s1"), ("s1", "s1")))
    (tmp_path / "servers.json").write_text(dump(Cluster(there, links)))
    return tmp_path


def plan(*arguments: str) -> int:
    return main(["plan", *arguments])


def test_a_plan_for_cpus(here: Path, golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    made = ("nets/token_nets.py:make_model", "f32[8,8]", *CPUS, "--micro-batches", "4")
    assert plan(*made, "--launch", "runs/first") == 0
    assert capsys.readouterr().out.endswith("start it: bash runs/first/launch.sh --steps 100\n")
    folder = here / "runs" / "first"
    assert sorted(path.name for path in folder.iterdir()) == ["job.slurm", "launch.sh", "plan.json", "train.py"]
    golden("launch/cpus/train.py", (folder / "train.py").read_text())
    golden("launch/cpus/launch.sh", (folder / "launch.sh").read_text())
    golden("launch/cpus/job.slurm", (folder / "job.slurm").read_text())


def test_a_plan_for_gpus_of_several_hosts(here: Path, golden: Golden) -> None:
    """On the meta device, in f16 under autocast with a scaler, with the optimizer's state shared out."""
    options = ("--cluster", "A:16", "--batch", "64", "--planner", "data parallel", "--micro-batches", "2", "--meta")
    types = ("--dtype", "f16", "--optimizer-sharding", "zero1")
    assert plan("nets/token_nets.py:tokens", *options, *types, "--launch", "gpus") == 0
    for name in ("train.py", "launch.sh", "job.slurm"):
        golden(f"launch/gpus/{name}", (here / "gpus" / name).read_text())


def test_stages_that_go_back_and_forth_between_hosts(here: Path) -> None:
    made = ("nets/token_nets.py:make_model", "f32[8,8]", "--cluster", "servers.json", *CPUS[2:], "--micro-batches", "4")
    assert plan(*made, "--launch", "run") == 0
    script = (here / "run" / "train.py").read_text()
    assert "RANKS = (\n    (0, 2),\n    (1, 3),\n)\n" in script
    assert "PROCESSES=(2 2)" in (here / "run" / "launch.sh").read_text()


def test_a_model_that_returns_its_loss(here: Path) -> None:
    made = ("nets/token_nets.py:with_loss", *CPUS)
    assert plan(*made, "--micro-batches", "4", "--launch", "run") == 0
    script = (here / "run" / "train.py").read_text()
    assert 'return {"ids": ids, "labels": ids}' in script  # one tensor, as it was planned
    assert "loss = pipe.step(**inputs)" in script
    assert "loss_fn" not in script


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (("--dtype", "bf16"), ("with torch.autocast(device, torch.bfloat16):", "torch.optim.AdamW(")),
        (("--dtype", "bf16", "--parameter-copies", "4"), ("model = make().to(torch.bfloat16)", "dtype=torch.bfloat16")),
        (("--dtype", "bf16", "--tensor-parallel", "2"), ("with torch.autocast(device, torch.bfloat16):",)),
        (("--dtype", "tf32"), ('torch.set_float32_matmul_precision("high")',)),
        (("--parameter-copies", "3"), ("torch.optim.SGD(pipe.parameters(), lr=1e-2, momentum=0.9)",)),
        (("--parameter-copies", "2"), ("torch.optim.SGD(pipe.parameters(), lr=1e-2)",)),
    ],
)
def test_types_and_optimizer_as_planned(here: Path, options: tuple[str, ...], lines: tuple[str, ...]) -> None:
    made = ("nets/token_nets.py:make_model", "f32[8,8]", "--cluster", "a100:2", *CPUS[2:])
    assert plan(*made, *options, "--launch", "run") == 0
    script = (here / "run" / "train.py").read_text()
    assert [line for line in lines if line not in script] == []


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("make_model", ("--cluster", "one.json"), "the plan has one device, cpu:0"),
        ("make_model", ("--cluster", "both.json"), "ranks run on CPUs alone or on GPUs alone"),
        ("make_model", ("--cluster", "h100:2", "--dtype", "f8"), "write --dtype bf16"),
        ("make_model", ("--cluster", "h100:2", "--dtype", "f16", "--parameter-copies", "4"), "write --dtype bf16"),
        (
            "make_model",
            ("--cluster", "h100:2", "--planner", "data parallel", "--optimizer-sharding", "zero3"),
            "plan with --optimizer-sharding zero1",
        ),
        ("with_loss", ("--cluster", "cpus.json", "--micro-batches", "1"), "write --micro-batches 2 or more"),
        ("counts", ("--cluster", "cpus.json"), "returns neither its loss nor a floating-point tensor"),
    ],
)
def test_plans_that_cannot_be_launched(
    here: Path, capsys: pytest.CaptureFixture[str], model: str, options: tuple[str, ...], says: str
) -> None:
    inputs = ("f32[8,8]",) if model == "make_model" else ()
    made = (f"nets/token_nets.py:{model}", *inputs, "--batch", "16", "--planner", "straight", "--time-limit", "2")
    assert plan(*made, *options, "--launch", "run") == 2
    assert says in capsys.readouterr().err
    assert not (here / "run").exists()


def test_a_folder_that_is_not_empty(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("nets/token_nets.py:make_model", "f32[8,8]", *CPUS, "--launch", "nets") == 2
    assert "nets is not empty: name another" in capsys.readouterr().err
    assert plan("nets/token_nets.py:make_model", "f32[8,8]", *CPUS, "--launch", "nets/token_nets.py") == 2
    assert [path.name for path in (here / "nets").iterdir()] == ["token_nets.py"]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("my-model.py:make", "'my-model' is no name in Python"),
        ("class.py:make", "'class' is no name in Python"),
        ("model.py:make()", "'make()' is no name in Python"),
        ("model.txt:make", "does not end in .py"),
        ("train.py:make", "rename train.py, as to my_train.py"),
        ("random.py:make", "another module is called 'random'"),
        ("rnnlm", "is no name in Python"),
    ],
)
def test_models_that_a_script_cannot_import(
    here: Path, capsys: pytest.CaptureFixture[str], path: str, says: str
) -> None:
    assert plan(path, "f32[8,8]", *CPUS, "--launch", "run") == 2
    assert says in capsys.readouterr().err
    assert not (here / "run").exists()


def test_names_of_folders_are_text(here: Path) -> None:
    """A folder whose name would be code where it is pasted into source."""
    odd = here / '\');import x;(\'""" $(touch y)'
    odd.mkdir()
    (odd / "token_nets.py").write_text(MODEL)
    assert plan(f"{odd.name}/token_nets.py:make_model", "f32[8,8]", *CPUS, "--launch", "run") == 0
    script = (here / "run" / "train.py").read_text()
    code = compile(script, "train.py", "exec")
    assert "x" not in code.co_names
    names: dict[str, object] = {"__file__": str(here / "run" / "train.py"), "__name__": "train"}
    exec(code, names)
    assert type(names["make"]()).__name__ == "Sequential"  # type: ignore[operator]


def test_the_job_starts_each_host(here: Path) -> None:
    """With commands in place of those of Slurm and torch: what they are called with."""
    made = ("nets/token_nets.py:make_model", "f32[8,8]", "--cluster", "servers.json", *CPUS[2:], "--micro-batches", "4")
    assert plan(*made, "--launch", "run") == 0
    commands = {
        "scontrol": 'printf "west\\neast\\n"',
        "srun": 'while [ "$1" != bash ]; do shift; done; for n in 0 1; do SLURM_NODEID=$n "$@"; done',
        "torchrun": 'echo "$HOST_INDEX: $*"',
    }
    (here / "bin").mkdir()
    for name, text in commands.items():
        (here / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (here / "bin" / name).chmod(0o755)
    variables = {"SLURM_SUBMIT_DIR": str(here / "run"), "SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "20007"}
    found = subprocess.run(
        ["bash", "run/job.slurm", "--steps", "7"],
        env={**os.environ, **variables, "PATH": f"{here / 'bin'}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.splitlines() == [
        f"{host}: --nnodes 2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint west:20007 "
        f"--rdzv-conf is_host={1 - host} train.py --steps 7"
        for host in (0, 1)
    ]
