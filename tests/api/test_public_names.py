"""The names of the package: imported when they are asked for, and told by `help(fxpipe)`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fxpipe
from fxpipe.api import public_names


def ran(script: str) -> str:
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    return found.stdout.strip()


def test_every_name_is_there() -> None:
    assert set(public_names.__all__) < set(fxpipe.__all__)
    for name in fxpipe.__all__:
        assert getattr(fxpipe, name) is not None
    with pytest.raises(AttributeError, match="module 'fxpipe' has no attribute 'compil'"):
        fxpipe.compil  # noqa: B018


def test_the_command_imports_torch_with_the_first_name_that_needs_it() -> None:
    """Subpackages are names, too, as after an import of all."""
    says = ran(
        "import sys; sys.argv[0] = '/bin/fxpipe'; import fxpipe\n"
        "fxpipe.__version__, fxpipe.FxpipeError, dir(fxpipe); print('torch' in sys.modules)\n"
        "print(fxpipe.viz.pictures.__name__, 'torch' in sys.modules)\n"
        "from fxpipe import *; print(compile.__module__)"
    )
    assert says.split() == ["False", "fxpipe.viz.pictures", "True", "fxpipe.api.compile"]


@pytest.mark.slow
def test_a_type_alone_has_a_picture() -> None:
    plan = "Plan('net', (StagePlan((), 'cpu', 'never'),), 1)"
    assert ran(f"from fxpipe.ir.plan.plan import Plan, StagePlan; print({plan}._repr_svg_()[:4])") == "<svg"


def test_help_begins_with_what_the_functions_are_for() -> None:
    about = (fxpipe.__doc__ or "").partition(">>>")[0]
    named = re.findall(r"fxpipe\.(\w+)", about)
    assert {"compile", "load", "plan", "search", "profile"} < set(named)
    for name in named:
        assert callable(getattr(fxpipe, name)) or isinstance(getattr(fxpipe, name), ModuleType)


def test_no_file_asks_the_package_for_names() -> None:
    """That would import all of them, among them perhaps the file itself, which is not there yet."""
    package = Path(fxpipe.__file__).parent
    asks = re.compile(r"^\s*from fxpipe import ", re.MULTILINE)
    files = [path for folder in (package, package / "passes", package / "codegen") for path in folder.rglob("*.py")]
    assert len(files) > 300
    assert [path.name for path in files if asks.search(path.read_text())] == []
