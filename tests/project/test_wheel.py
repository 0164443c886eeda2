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
    """In an environment of its own, which has torch and what it needs from this one."""
    wheel = packed("wheel", tmp_path)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    site = next((environment / "lib").glob("python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))
    script = "import doctest, fxpipe; print(fxpipe.__file__, doctest.testmod(fxpipe))"
    python = environment / "bin" / "python"
    run = subprocess.run([python, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(site)), run.stdout
    assert "failed=0" in run.stdout
