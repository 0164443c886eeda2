"""The import rules, read from the source of every file.

    api.cli ─▶ demo ─▶ api ─▶ training ─▶ pipe
      ─▶ capture, profiling, planning, schedules, passes, codegen, engines, viz
      ─▶ batching ─▶ ir, runtime ─▶ torch_internals ─▶ errors

A file imports from its own room and from the levels below; rooms of one level do not import each other. The rooms that
decide do not import torch. No two files import each other, directly or through others.
"""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEVELS = (
    {"errors"},
    {"torch_internals"},
    {"ir", "runtime"},
    {"batching"},
    {"capture", "profiling", "planning", "schedules", "passes", "codegen", "engines", "viz"},
    {"pipe"},
    {"training"},
    {"api"},
    {"demo"},
    {"api.cli"},
    {"", "__main__"},  # the public names
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
TORCH_FREE = ("planning", "schedules")
VERBS = {"plan.py", "profile.py"}  # a verb in api/, and in ir/ the noun that it makes


@cache
def files() -> Mapping[str, Path]:
    """The files of the package by the full names of their modules; `passes` and `codegen` are links."""
    found = {}
    for folder, _, names in os.walk(ROOT / "fxpipe", followlinks=True):
        for name in names:
            if name.endswith(".py"):
                parts = (Path(folder) / name).relative_to(ROOT).with_suffix("").parts
                found[".".join(parts[:-1] if name == "__init__.py" else parts)] = Path(folder) / name
    return found


def imports(text: str, module: str, is_package: bool) -> Iterator[str]:
    """Full names of what a file imports, under `TYPE_CHECKING` and in functions too."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def imported() -> Mapping[str, frozenset[str]]:
    """The modules that each module imports; ours as they are, others by the name of their package."""

    def resolved(name: str) -> str:
        if name.split(".")[0] != "fxpipe":
            return name.split(".")[0]
        return name if name in files() else name.rpartition(".")[0]

    return {
        module: frozenset(
            found
            for name in imports(path.read_text(), module, path.name == "__init__.py")
            if (found := resolved(name)) != module
        )
        for module, path in files().items()
    }


def room_of(module: str) -> str:
    """The room of one of our modules, `api.cli` apart from `api`."""
    inside = module.removeprefix("fxpipe").removeprefix(".")
    return "api.cli" if inside.startswith("api.cli") else inside.split(".")[0]


@pytest.mark.parametrize("module", sorted(files()))
def test_a_file_imports_only_from_the_levels_below(module: str) -> None:
    room = room_of(module)
    for other in imported()[module]:
        if other.split(".")[0] == "fxpipe" and room_of(other) != room:
            assert LEVEL[room_of(other)] < LEVEL[room], f"{module} imports {other}, which stands no lower"


def test_no_two_files_import_each_other() -> None:
    """What is left of the graph of imports when files that import nothing of it, or that nothing of it imports, are
    taken away again and again, are circles and what lies between two of them."""
    left = {module: {other for other in others if other in files()} for module, others in imported().items()}
    while left:
        used = set().union(*left.values())
        kept = {module for module, others in left.items() if others and module in used}
        if kept == set(left):
            break
        left = {module: left[module] & kept for module in kept}
    assert not left, "\n".join(f"{module} imports {sorted(others)}" for module, others in left.items())


@pytest.mark.parametrize("room", TORCH_FREE)
def test_rooms_that_decide_do_not_import_torch(room: str) -> None:
    """Neither do the files that they read, followed to the end."""
    todo, seen = [module for module in files() if room_of(module) == room], set[str]()
    while todo:
        module = todo.pop()
        assert "torch" not in imported()[module], f"{module} imports torch; {room} must do without"
        todo += [other for other in imported()[module] if other in files() and other not in seen and other != "fxpipe"]
        seen.update(todo)


def test_every_room_has_a_level() -> None:
    assert {room_of(module) for module in files()} == set(LEVEL)


def test_folders_and_files_are_of_a_size_to_look_at() -> None:
    folders = Counter(path.parent for path in files().values())
    folders.update(folder.parent for folder in list(folders) if folder != ROOT / "fxpipe")
    crowded = {str(folder): count for folder, count in folders.items() if count > 15 and folder != ROOT / "fxpipe"}
    assert not crowded, f"folders of more than 15 entries: {crowded}"
    entries = [path for path in (ROOT / "fxpipe").iterdir() if path.name != "__pycache__"]
    assert len(entries) <= 20, f"{len(entries)} entries in fxpipe/"
    long = {str(path): count for path in files().values() if (count := path.read_text().count("\n")) > 400}
    assert not long, f"files of more than 400 lines: {long}"


def test_no_two_files_have_the_same_name() -> None:
    names = Counter(path.name for path in files().values() if path.name != "__init__.py")
    assert {name for name, count in names.items() if count > 1} <= VERBS


def test_the_rule_sees_relative_imports() -> None:
    text = "from .b import c\nfrom ..ir.graph import Op\nfrom .. import errors\nimport torch.nn"
    names = set(imports(text, "fxpipe.planning.a", False))
    assert names == {"fxpipe.planning.b.c", "fxpipe.ir.graph.Op", "fxpipe.errors", "torch.nn"}
    assert "fxpipe.planning.b.c" in set(imports(text, "fxpipe.planning", True))
