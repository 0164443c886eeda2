"""The rooms' import rules, read from the source: who may import whom, and who must do without torch.

ir, runtime                 nothing of ours
every other room            ir (and errors)
engines                     ir, runtime, errors
compile, backend, cli, ...  the rooms (they are the street)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH_FREE = {"planning", "schedules", "simulator", "soap"}
ALLOWED = {"ir": set[str](), "runtime": set[str](), "engines": {"ir", "runtime", "errors"}}
ROOMS = ["ir", "capture", "profiling", "planning", "schedules", "simulator", "runtime", "engines", "viz", "soap"]
ROOMS += ["passes", "codegen"]
FILES = [(room, path) for room in ROOMS for path in sorted((ROOT / "fxpipe" / room).glob("**/*.py"))]


def imports(path: Path, package: str) -> Iterator[str]:
    """Full names of the modules that a file imports; relative ones resolved against `package`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "fxpipe" and len(parts) > 1 else None


@pytest.mark.parametrize(("room", "path"), FILES, ids=[str(path.relative_to(ROOT)) for _, path in FILES])
def test_a_room_imports_only_what_it_may(room: str, path: Path) -> None:
    may = ALLOWED.get(room, {"ir", "errors"}) | {room}
    names = set(imports(path, f"fxpipe.{room}"))
    seen = {found for name in names if (found := room_of(name)) and found not in may}
    assert not seen, f"{path.relative_to(ROOT)} imports {sorted(seen)}; {room} may import {sorted(may)}"


@pytest.mark.parametrize("room", sorted(TORCH_FREE))
def test_rooms_that_decide_do_not_import_torch(room: str) -> None:
    """Neither do the files of ir that they read, followed to the end."""
    todo = [(path, f"fxpipe.{room}") for path in (ROOT / "fxpipe" / room).glob("*.py")]
    seen: set[Path] = set()
    while todo:
        path, package = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imports(path, package):
            assert name.split(".")[0] != "torch", f"{path.relative_to(ROOT)} imports torch; {room} must do without"
            if name.startswith("fxpipe.ir."):
                file = ROOT / Path(*name.split(".")).with_suffix(".py")
                todo += [(file, "fxpipe.ir")] if file.exists() else []


def test_the_rule_sees_relative_imports(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("from .b import c\nfrom ..ir.graph import Op\nfrom .. import errors\nimport torch.nn")
    names = set(imports(file, "fxpipe.planning"))
    assert {"fxpipe.planning.b", "fxpipe.ir.graph", "fxpipe.errors", "torch.nn"} <= names
