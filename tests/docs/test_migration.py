"""What a page of the migration shows as "before" runs, too, and ends with the loss that "after" prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.page_blocks import blocks

MIGRATION = Path(__file__).parents[2] / "docs" / "migration"


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "page", "ranks"), [("torch", "torch_pipelining", 2), ("torchgpipe", "torchgpipe", 1)])
def test_before_ends_with_the_loss_of_after(peer: str, page: str, ranks: int, tmp_path: Path) -> None:
    pytest.importorskip(peer)
    shown = blocks((MIGRATION / f"{page}.md").read_text())
    before = next(block.text for block in shown if block.language == "py")
    after = next(block.text for block in shown if block.language == "output")
    script = tmp_path / "before.py"
    script.write_text(before)
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run([sys.executable, *start, script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == after
