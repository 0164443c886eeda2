"""What is packed: the package alone, whatever lies beside it, with real files in place of links; and that it runs where
it is installed, with what it requires and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKED = ("fxpipe", "passes", "codegen", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
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
assert main(["doctor"]) == 0
assert doctest.testmod(fxpipe).failed == 0
assert main("show model.py:make --devices 2 --save package".split()) == 0
plain, x = make()
assert (fxpipe.load("package", plain)(x) - plain(x)).abs().max() < 1e-6
assert main("plan model.py:make --cluster A --batch 64 --planner dapple --out plan.json".split()) == 0
assert main(["simulate", "plan.json"]) == 0
"""
BUILD = "import setuptools.build_meta as build; print(build.build_{kind}({folder!r}))"


def packed(kind: str, tmp_path: Path) -> Path:
    """A wheel or sdist of a copy of the tree, beside which there are tests, and folders with similar names."""
    tree = tmp_path / "tree"
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in PACKED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, tree / name)
    for beside in ("fxpipe-demo", "fxpipe_saved", "fxpipes", "tests", "benchmarks"):
        (tree / beside).mkdir()
        (tree / beside / "__init__.py").write_text("")
        (tree / beside / "test_stage0.py").write_text("")
    return built(kind, tree, tmp_path)


def built(kind: str, tree: Path, folder: Path) -> Path:
    """A wheel or sdist of a tree, in a folder."""
    command = [sys.executable, "-c", BUILD.format(kind=kind, folder=str(folder))]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder / run.stdout.split()[-1]


def test_the_wheel_holds_the_package_alone(tmp_path: Path) -> None:
    with zipfile.ZipFile(packed("wheel", tmp_path)) as wheel:
        names = wheel.namelist()
    files = [name for name in names if not name.split("/")[0].endswith(".dist-info")]
    assert {name.split("/")[0] for name in files} == {"fxpipe"}
    here = {str(path.relative_to(ROOT)) for path in python_files(ROOT / "fxpipe")}
    assert here == {name for name in files if name.endswith(".py")}
    assert {"fxpipe/py.typed", "fxpipe/codegen/package/load_package.py", "fxpipe/passes/cut.py"} <= {*files}


def test_the_source_archive_makes_the_same_wheel(tmp_path: Path) -> None:
    """And it has only what the wheel is made of."""
    with tarfile.open(packed("sdist", tmp_path)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    made = {"PKG-INFO", "fxpipe.egg-info", "setup.cfg"}
    assert {path.name for path in source.iterdir()} - made == {*PACKED} - {"passes", "codegen"}  # links are followed
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    assert contents(built("wheel", source, theirs)) == contents(built("wheel", tmp_path / "tree", ours))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def python_files(folder: Path) -> list[Path]:
    """All of a folder, links followed."""
    return [
        Path(at) / name for at, _, names in os.walk(folder, followlinks=True) for name in names if name[-3:] == ".py"
    ]


def lend(site: Path, *requirements: str) -> None:
    """Put links into a folder to distributions that are installed here, and to all that they require."""
    todo, seen = [*map(Requirement, requirements)], set[tuple[str, str]]()
    while todo:
        wanted = todo.pop()
        found = distribution(wanted.name)
        for top in tops(found):
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
        for extra in {"", *wanted.extras}:
            if (wanted.name, extra) not in seen:
                seen.add((wanted.name, extra))
                todo += required(found.requires or (), extra)


def tops(found: Distribution) -> set[str]:
    """What an installed distribution has in site-packages."""
    return {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}


def required(lines: Sequence[str], extra: str) -> list[Requirement]:
    """Those that count here, with an extra or with none ("")."""
    known = map(Requirement, lines)
    return [one for one in known if one.marker is None or one.marker.evaluate({"extra": extra})]


@pytest.mark.slow
def test_an_installed_wheel_runs_the_tour(tmp_path: Path) -> None:
    """In an environment of its own, which has torch and what else the wheel requires from this one, and nothing else:
    the tour of the package, and its commands, as a user starts them."""
    wheel = packed("wheel", tmp_path)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    site = next((environment / "lib").glob("python*/site-packages"))
    python, work = environment / "bin" / "python", tmp_path / "work"
    work.mkdir()

    def run(*command: str | Path) -> str:
        without = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=work, env=without, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    to = ("--no-deps", "--no-index", "--no-compile", "--ignore-installed", "--prefix", environment)
    run(sys.executable, "-m", "pip", "install", "-q", *to, wheel)
    (own,) = Distribution.discover(name="fxpipe", path=[str(site)])
    lend(site, *map(str, required(own.requires or (), "")))
    (work / "model.py").write_text(MODEL)
    (work / "tour.py").write_text(TOUR)
    shown = run(python, "tour.py")
    assert shown.startswith(str(site)), shown
    assert "2 stages" in shown
    assert "bubble" in shown
    lend(site, *map(str, required(own.requires or (), "demo")))
    assert "stages.svg, timeline.svg, package/" in run(environment / "bin" / "fxpipe", "demo", "--steps", "1")
