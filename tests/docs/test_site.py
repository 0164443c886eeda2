"""The site builds without a warning; a link that leads nowhere inside of it is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs pip install -e '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", ROOT / "docs", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fxpipe.compile" in (tmp_path / "site" / "reference" / "api.html").read_text()


@pytest.mark.slow
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs pip install -e '.[docs]'")
    (tmp_path / "conf.py").write_text((ROOT / "docs" / "conf.py").read_text().replace('["_static"]', "[]"))
    (tmp_path / "index.md").write_text("# A page\n\n[gone](gone.md#there)\n")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", tmp_path, tmp_path / "site"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "gone.md" in done.stderr
