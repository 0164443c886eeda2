"""Transforms and passes over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.whole.ranks import open_compiler
from tests.whole.ranks.pool import Pool


@pytest.mark.slow
@pytest.mark.parametrize("backward", ["autograd", "code"])
def test_open_compiler(pool: Pool, tmp_path: Path, backward: str) -> None:
    pool.run(open_compiler.opened, tmp_path / "out", backward, ranks=(0, 1))
