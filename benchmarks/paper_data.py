"""Where the figures of published papers and their authors' profiles are. They are not part of fxpipe: whoever has them
puts them beside the repository, in `../shared/paper-data`, or names the folder in FXPIPE_PAPER_DATA."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
MISSING = "no figures of papers: set FXPIPE_PAPER_DATA to their folder"


def folder() -> Path | None:
    """The folder, None where there is none."""
    named = os.environ.get("FXPIPE_PAPER_DATA")
    path = Path(named) if named else HERE.parent / "shared" / "paper-data"
    return path if (path / "dapple").is_dir() else None


def profile_path(name: str) -> Path:
    """A profile of DAPPLE's authors, by the name of its file without ending."""
    found = folder()
    if found is None:
        raise FileNotFoundError(MISSING)
    return found / "dapple" / f"{name}.json"


@cache
def expected() -> Any:
    """The tables of the DAPPLE paper."""
    return json.loads(profile_path("expected").read_text())


def lines(name: str) -> list[str]:
    """The lines of a page of figures, by the name of its file without ending."""
    found = folder()
    if found is None:
        raise FileNotFoundError(MISSING)
    return (found / f"{name}.md").read_text(encoding="utf-8").splitlines()
