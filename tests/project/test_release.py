"""What a release needs agrees: one version in all files, requirements that are those of the code, and a changelog that
tools and users can read."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

import fxpipe
from fxpipe.torch_internals.capability import HIGHEST, LOWEST, TESTED
from tests.project.test_imports import imported

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
REQUIRED = {one.name: one for one in map(Requirement, PROJECT["dependencies"])}
EXTRAS = {name: [*map(Requirement, listed)] for name, listed in PROJECT["optional-dependencies"].items()}
OPTIONAL = {one.name: one for whole in EXTRAS["all"] for extra in whole.extras for one in EXTRAS[extra]}
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # of modules with another name
RECIPE = (ROOT / "docs" / "release" / "recipe.yaml").read_text()


def test_one_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f'\n  version: "{PROJECT["version"]}"\n' in RECIPE
    assert fxpipe.__version__ in (PROJECT["version"], "not installed")


def test_what_the_code_imports_is_required() -> None:
    """By all, or by an extra; and nothing else is."""
    modules = {name.split(".")[0] for names in imported().values() for name in names}
    found = {DISTRIBUTIONS.get(name, name) for name in modules - sys.stdlib_module_names - {"fxpipe"}}
    assert found == REQUIRED.keys() | OPTIONAL.keys()


def test_the_recipe_is_the_projects() -> None:
    """That of conda-forge, which calls torch pytorch, and has no extras: it bounds what they would bring."""
    python = PROJECT["requires-python"]
    assert f'\n  python_min: "{python.removeprefix(">=")}"\n' in RECIPE
    torch = str(REQUIRED["torch"]).replace("torch", "pytorch")
    others = {str(one) for name, one in REQUIRED.items() if name != "torch"}
    assert in_recipe("run") == {"python>=${{ python_min }}", torch} | others
    assert in_recipe("run_constraints") == {*map(str, OPTIONAL.values())}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert in_recipe("host") == {"python${{ python_min }}.*", "pip", *build}
    commands = {f"{name} = {function}" for name, function in PROJECT["scripts"].items()}
    assert {*re.findall(r"- (\w+ = .*)", RECIPE)} == commands
    assert f"\n  summary: {PROJECT['description']}\n  license: {PROJECT['license']}\n" in RECIPE


def in_recipe(name: str) -> set[str]:
    """The requirements of this name, as pyproject.toml writes them."""
    found = re.search(rf"^  {name}:\n((?:    - .*\n)+)", RECIPE, re.MULTILINE)
    assert found, name
    return {line.replace(" ", "", 1) for line in re.findall(r"- (.*)", found[1])}


def test_ci_builds_as_the_release_page_says() -> None:
    page, ci = (ROOT / "docs" / "release" / "index.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for page_says, ci_runs in (
        ("    python -m build\n", 'python -m build --outdir "$folder/dist"\n'),
        ("    twine check --strict dist/*\n", 'twine check --strict "$folder"/dist/*\n'),
    ):
        assert page_says in page
        assert ci_runs in ci
    tested = re.findall(r"install (?:3\.\d+) (\d+\.\d+)\.\d+; then\n(.*?)^fi$", ci, re.MULTILINE | re.DOTALL)
    assert sorted(torch for torch, _ in tested) == re.findall(r"\d+\.\d+", TESTED)
    assert all("    wheel\n" in commands for _, commands in tested)


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
