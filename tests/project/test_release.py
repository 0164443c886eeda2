"""What a release needs agrees: one version in all files, and a changelog that tools and users can read."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import fxpipe
from fxpipe.torch_internals.capability import HIGHEST, LOWEST, TESTED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def test_one_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert fxpipe.__version__ in (PROJECT["version"], "not installed")


def test_one_range_of_torch() -> None:
    said = (ROOT / "docs" / "reference" / "versions.md").read_text()
    wanted = f"torch>={LOWEST[0]}.{LOWEST[1]}"
    assert wanted in PROJECT["dependencies"]
    assert f"`{wanted}`" in said
    assert f"{TESTED} have been tested" in said
    assert TESTED.startswith(f"{LOWEST[0]}.{LOWEST[1]},")
    assert TESTED.endswith(f" {HIGHEST[0]}.{HIGHEST[1]}")


def test_the_changelog_is_in_groups() -> None:
    """Versions, newest first; in each, every group at most once; in groups only entries, of at most four lines. The
    first version has nothing before it that could be changed, removed or fixed."""
    _, *versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0].startswith("Unreleased\n")
    for text in versions:
        name, *groups = re.split(r"^### ", text, flags=re.MULTILINE)
        assert re.fullmatch(r"Unreleased|\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", name.strip()), f"outside of a group: {name}"
        titles = [group.split("\n")[0] for group in groups]
        assert titles == [title for title in GROUPS if title in titles], titles
        for group in groups:
            body = group.partition("\n")[2].strip()
            entries = re.split(r"^- ", body, flags=re.MULTILINE)
            assert not entries[0], entries[0]
            long = [entry for entry in entries if entry.strip().count("\n") >= 4]
            assert not long, f"an entry is at most four lines: {long}"
            assert len(set(entries)) == len(entries), "an entry is there twice"
    assert titles == ["Added"], (
        f"the first version has only Added: what is in {titles[1:]} belongs there, as users see it"
    )
