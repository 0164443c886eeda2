"""A saved package runs over ranks: from a pipe over ranks, or from one in one process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import fxpipe
from fxpipe.errors import InputError
from tests.whole.ranks import packages
from tests.whole.ranks.driven import example, loss_fn
from tests.whole.ranks.pool import Pool


def test_packages(pool: Pool, tmp_path: Path) -> None:
    over_ranks, alone, call, edited = (tmp_path / name for name in ("ranks", "alone", "call", "edited"))
    ids, scale, target = example()
    pipe = fxpipe.compile(packages.model_of(0), devices=2, chunks=4, schedule="1f1b")
    pipe.step(ids, scale, target=target, loss_fn=loss_fn)
    pipe.save(alone)
    pipe(ids, scale)
    pipe.save(call)
    pipe.close()
    for rank in range(2):
        file = shutil.copytree(alone, edited / str(rank)) / "stage0.py"
        file.write_text(file.read_text() + f"    # edited on rank {rank}\n")
    for function, *paths in ((packages.saved, over_ranks, alone), (packages.refused, call, edited)):
        pool.run(function, *paths, ranks=(0, 1))
    pool.run(packages.refused_by_more, alone)
    loaded = fxpipe.load(over_ranks, packages.model_of(0))  # that of a call, in one process
    assert loaded.forward_only(ids, scale).shape == (*ids.shape, 11)
    with pytest.raises(InputError, match="calls compute no gradients"):
        loaded(ids, scale)
    loaded.close()
