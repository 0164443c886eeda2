"""The command line: every option of the functions, and errors in one line with the exit status 2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from fxpipe.api.cli.main import COMMANDS, main, parser
from fxpipe.pipe import progress
from fxpipe.pipe.options.compile_table import COMPILE
from fxpipe.pipe.verify import versions
from tests.helpers.marks import mostly_slow

MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), (torch.zeros(8, 8),)

def wrong():
    raise TypeError("a wrong type\\nand more lines")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return "model.py:make"


def run(*arguments: str) -> int:
    return main(arguments)


def test_show_has_every_option_of_compile(capsys: pytest.CaptureFixture[str]) -> None:
    """But those of ranks, and tensors and functions, which a command line cannot say."""
    absent = {"example_inputs", "group", "timeout", "check_inputs", "transforms", "passes"}
    assert run("show", "--help") == 0
    shown = capsys.readouterr().out
    for name, option in COMPILE.items():
        assert bool(re.search(f"^  {option.flag}[ ,]", shown, re.MULTILINE)) == (name not in absent), name


def test_options_are_read_as_in_python(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--devices cpu,cpu,cpu --chunks 4 --cut 2,3,1 --checkpoint 0,2 --schedule 1f1b --warmup 3,2,1"
    assert run("show", file, *options.split(), "--batch-dim", "input=0", "--deferred-batch-norm") == 0
    out = capsys.readouterr().out
    assert "Sequential: 3 stages, 4 micro-batches" in out
    assert [out.count(f"stage{stage}.py") > 0 for stage in range(4)] == [True, True, True, False]
    parsed = parser("show").parse_args(["show", file, "--compile-stages", "--reduce", "loss=mean", "--offload", "1"])
    assert (parsed.compile_stages, parsed.reduce, parsed.offload) == (True, {"loss": "mean"}, {1})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("shw",), "fxpipe: argument command: invalid choice: 'shw' .*; did you mean 'show'?"),
        ((), "fxpipe: the following arguments are required: command"),
        (
            ("show", "{}", "--chunks", "2.5"),
            "fxpipe show: argument --chunks: '2.5': write a whole number",
        ),
        (("show", "{}", "--schedule", "1F1B"), "argument --schedule: '1F1B': write .*; did you mean '1f1b'?"),
        (("show", "{}", "--chnks", "2"), "fxpipe show: there is no option '--chnks' here; did you mean '--chunks'?"),
        (("show", "{}", "--checkpoint", "0;2"), "write 'auto', .*, or a set of stages, as in --checkpoint 0,2"),
        (("show", "{}", "--devices", "cdua:0,cpu"), "fxpipe: 'cdua:0' in devices is not a device"),
        (("show", "{}", "--compile-stages", "inducto"), "did you mean 'inductor'?"),
        (("show", "model.py:wrong"), r"fxpipe: model.py:9  TypeError: a wrong type; --traceback shows more"),
        (("plan", "{}", "--cluster", "here", "--batch", "0"), "argument --batch: '0': write a whole number"),
        (("plan", "{}", "--cluster", "here", "--batch", "8", "--planner", "dappel"), "did you mean 'dapple'?"),
        (("plan", "{}", "--cluster", "h100:4", "--bacth", "64"), "no option '--bacth' here; did you mean '--batch'?"),
        (("plan", "{}", "--cluster", "h100:4", "--bat", "0"), "argument --batch: '0': write a whole number"),
        (("show", "{}", "--memory-limit", "8GB"), "as in --memory-limit 2000000000; did you mean 8000000000?"),
        (("show", "{}", "--checkpoint", "all"), "as in --checkpoint 0,2; did you mean 'always'?"),
        (("show", "{}", "--devices", "9", "--chunks", "2"), "Ask for at most 6: --devices 6"),
        (("plan", "{}", "--batch", "8"), "fxpipe plan: the following arguments are required: --cluster"),
        (("search", "{}", "--cluster", "k80:2", "--method", "mcm"), "did you mean 'mcmc'?"),
        (("show", "{}", "--reduce", "loss=maen"), "did you mean 'mean'?"),
        (("show", "{}", "--cut", "tme"), "did you mean 'time'?"),
        (("show", "model.py:maek"), "model.py has no function 'maek'; did you mean 'make'?"),
        (("plan", "{}", "--cluster", "h1000", "--batch", "8"), "there is no cluster 'h1000'; .*; did you mean 'h100'?"),
        (("search", "rnnl", "--cluster", "k80:2"), "'rnnl' is no published model: .*; did you mean 'rnnlm'?"),
        (("simulate", "none.json"), "fxpipe: no plan to look at in 'none.json'"),
    ],
)
def test_errors_are_one_line(
    file: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert run(*(argument.replace("{}", file) for argument in arguments)) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1, err
    assert re.search(says.replace("?", r"\?"), err), err


def test_a_traceback_where_it_is_asked_for(file: str) -> None:
    with pytest.raises(TypeError):
        run("show", "model.py:wrong", "--traceback")


def test_a_reader_that_has_read_enough(
    file: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LATE", 60)  # on a slow machine a capture says what it is at
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert run("show", file, "--devices", "2") == 2
    assert capfd.readouterr().err == ""


def test_as_a_module() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "fxpipe", "--version"], capture_output=True, text=True, check=True, env=os.environ
    )
    assert re.fullmatch(r"fxpipe \S+, torch \S+, Python \S+\n", found.stdout)


def test_from_a_folder_that_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> str:
        if name == "fxpipe":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(versions, "version", unknown)
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("fxpipe not installed, torch ")


@pytest.mark.parametrize(
    "arguments", [("--help",), ("--version",), (), ("shw",), ("shw", "--help"), ("completion", "-h")]
)
def test_what_needs_no_torch_does_not_import_it(arguments: tuple[str, ...]) -> None:
    script = f"""
import sys
sys.argv[0] = "/bin/fxpipe"
from fxpipe.api.cli.main import main
status = main({arguments})
print("torch" in sys.modules, status)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    asked = any(word.startswith("-") for word in arguments) and "shw" not in arguments
    assert found.stdout.splitlines()[-1] == f"False {0 if asked else 2}", found.stdout + found.stderr


@pytest.mark.parametrize("first", mostly_slow(["", "import torch; "], "".__eq__))
def test_what_an_import_registers_is_there(first: str) -> None:
    script = f"{first}import fxpipe; from torch.distributed import rendezvous; next(rendezvous('fxpipe://', -1, 1))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ, check=False)
    assert "environment variable RANK expected" in found.stderr  # else: no rendezvous handler for fxpipe://


def test_every_command_has_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    top = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n    {name}" in top
        assert run(name, "--help") == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: fxpipe {name} ")
        assert set(re.findall(r"^  ([a-z{-]\S*)", shown, re.MULTILINE)) > {"-h,", "--traceback"}
