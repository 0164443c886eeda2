"""Signature, docstring, page and help have the same options in the same groups, with the same words about defaults."""

from __future__ import annotations

import re
from inspect import Parameter, getdoc, signature
from pathlib import Path

import pytest

import fxpipe
from fxpipe.api.cli.main import main
from fxpipe.api.cli.model_commands import DEFAULTS
from fxpipe.api.cli.option_arguments import NOT_SHOWN
from fxpipe.pipe.options.compile_table import COMPILE, GROUPS

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "options.md"


def in_order(text: str, parts: list[str]) -> None:
    """Check that a text has these parts, each behind the one before."""
    at = 0
    for part in parts:
        found = text.find(part, at)
        assert found >= 0, f"missing, or not in this order: {part}"
        at = found + len(part)


def test_the_signature() -> None:
    _, *parameters = signature(fxpipe.compile).parameters.values()
    shown = {one.name: one.default for one in parameters if one.kind is not Parameter.VAR_KEYWORD}
    assert list(shown) == list(COMPILE)
    assert shown == {name: option.default for name, option in COMPILE.items()}
    assert list(GROUPS) == ["model", "cutting", "running", "ranks", "code"]


def test_each_default_has_a_reason_and_a_cost() -> None:
    for option in COMPILE.values():
        assert re.fullmatch(r"[^;]{10,}; [^;]{10,}", option.why), option.name


def test_the_docstring() -> None:
    """Besides, it has no item for what is no option."""
    text = getdoc(fxpipe.compile) or ""
    assert re.findall(r"^- `(\w+)`: ", text, re.MULTILINE) == list(COMPILE)
    parts = []
    for name, group in GROUPS.items():
        parts += [f"**{name}**: {group.about} "]
        parts += [part for option in group.options for part in (f"- `{option.name}`: ", option.default_text)]
    in_order(" ".join(text.split()), parts)


def test_the_page() -> None:
    text = PAGE.read_text()
    parts = []
    for name, group in GROUPS.items():
        parts += [f"\n## {name}\n\n{group.about.capitalize()}.\n"]
        rows = [(f"`{one.name}`", one.about, one.values_text, one.default_text) for one in group.options]
        parts += [f"\n| {' | '.join(row)} |\n" for row in rows]
    in_order(text.replace("|\n", "|\n\n"), parts)
    assert text.count("\n| `") == len(COMPILE)


def test_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--help"]) == 0
    parts = []
    for name, group in GROUPS.items():
        parts += [f"{name}: {group.about}"]
        for option in group.options:
            if option.name not in NOT_SHOWN:
                own = option.name in DEFAULTS
                parts += [option.flag, f"Default {DEFAULTS[option.name]}." if own else option.default_text]
    text = re.sub(r"-\n\s+", "-", capsys.readouterr().out)  # argparse breaks words at hyphens
    in_order(" ".join(text.split()), parts)
