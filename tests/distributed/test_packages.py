"""A saved package runs over ranks: from a pipe over ranks, or from one in one process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import fxpipe
from fxpipe.errors import InputError
from tests.distributed import packages
from tests.distributed.driven import example, loss_fn
from tests.distributed.pool import Pool


def test_packages(pool: Pool, tmp_path: Path) -> None:
    over_ranks, alone, call, copies = (tmp_path / name for name in ("ranks", "alone", "call", "copies"))
    ids, scale, target = example()
    for path, devices in ((alone, 4), (copies, 2)):
        pipe = fxpipe.compile(packages.model_of(0), devices=devices, chunks=4, schedule="1f1b")
        pipe.step(ids, scale, target=target, loss_fn=loss_fn)
        pipe.save(path)
        pipe.close()
    pipe = fxpipe.compile(packages.model_of(0), devices=2, chunks=4)
    pipe(ids, scale)
    pipe.save(call)
    pipe.close()
    for rank in range(2):
        made = shutil.copytree(copies, tmp_path / "edited" / str(rank))
        file = made / "stage0.py"
        file.write_text(file.read_text() + f"    # edited on rank {rank}\n")
    pool.start(packages.refused, alone, call, tmp_path / "edited", ranks=(0, 1))
    pool.results((0, 1))
    pool.run(packages.saved, over_ranks, alone)
    loaded = fxpipe.load(over_ranks, packages.model_of(0))  # that of a call, in one process
    assert loaded.forward_only(ids, scale).shape == (*ids.shape, 11)
    with pytest.raises(InputError, match="calls compute no gradients"):
        loaded(ids, scale)
    loaded.close()
