"""What is packed: the package alone, whatever lies beside it, with real files in place of links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKED = ("fxpipe", "passes", "codegen", "pyproject.toml", "README.md", "LICENSE")
MODEL = """
import torch
from torch import nn


def make():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.ones(8, 8)
"""
TOUR = """
import doctest
import fxpipe
from fxpipe.api.cli.main import main
from model import make

print(fxpipe.__file__)
assert doctest.testmod(fxpipe).failed == 0
plain, x = make()
assert (fxpipe.load("package", plain)(x) - plain(x)).abs().max() < 1e-6
assert main("plan model.py:make --cluster A --batch 64 --planner dapple --out plan.json".split()) == 0
assert main(["simulate", "plan.json"]) == 0
"""
BUILD = "import setuptools.build_meta as build; print(build.build_{kind}({folder!r}))"


def packed(kind: str, tmp_path: Path) -> Path:
    """A wheel or sdist of a copy of the tree, beside which there are folders with similar names."""
    tree = tmp_path / "tree"
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in PACKED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, tree / name)
    for beside in ("fxpipe-demo", "fxpipe_saved", "fxpipes"):
        (tree / beside).mkdir()
        (tree / beside / "__init__.py").write_text("")
        (tree / beside / "stage0.py").write_text("")
    command = [sys.executable, "-c", BUILD.format(kind=kind, folder=str(tmp_path))]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return tmp_path / run.stdout.split()[-1]


def test_the_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    with zipfile.ZipFile(packed("wheel", tmp_path)) as wheel:
        names = wheel.namelist()
    files = [name for name in names if not name.split("/")[0].endswith(".dist-info")]
    assert {name.split("/")[0] for name in files} == {"fxpipe"}
    here = {str(path.relative_to(ROOT)) for path in python_files(ROOT / "fxpipe")}
    assert here == {name for name in files if name.endswith(".py")}
    assert {"fxpipe/py.typed", "fxpipe/codegen/package/load_package.py", "fxpipe/passes/cut.py"} <= {*files}


def test_the_source_archive_holds_no_folders_beside_it(tmp_path: Path) -> None:
    with tarfile.open(packed("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in names if name.startswith(("fxpipe-", "fxpipe_", "fxpipes"))]
    assert {"fxpipe/py.typed", "fxpipe/codegen/package/load_package.py", "fxpipe/passes/cut.py"} <= names


def python_files(folder: Path) -> list[Path]:
    """All of a folder, links followed."""
    return [
        Path(at) / name for at, _, names in os.walk(folder, followlinks=True) for name in names if name[-3:] == ".py"
    ]


@pytest.mark.slow
def test_an_installed_wheel_runs_the_tour(tmp_path: Path) -> None:
    """In an environment of its own, which has torch and what it needs from this one: the tour of the package, and its
    commands, as a user starts them."""
    wheel = packed("wheel", tmp_path)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    python, work = environment / "bin" / "python", tmp_path / "work"
    work.mkdir()

    def run(*command: str | Path) -> str:
        without = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=work, env=without, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    to = ("--no-deps", "--no-index", "--no-compile", "--ignore-installed", "--prefix", environment)
    run(sys.executable, "-m", "pip", "install", "-q", *to, wheel)
    (work / "model.py").write_text(MODEL)
    command = environment / "bin" / "fxpipe"
    assert "2 stages" in run(command, "show", "model.py:make", "--devices", "2", "--save", "package")
    (work / "tour.py").write_text(TOUR)
    shown = run(python, "tour.py")
    assert shown.startswith(str(site)), shown
    assert "bubble" in shown
