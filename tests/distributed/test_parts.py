"""What a run over ranks needs beside steps: memory for its own stages alone, checkpoints, and the loop around it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import fxpipe
from tests.distributed import parts
from tests.distributed.pool import Pool
from tests.test_checkpoint import Net, adam, train

ALL, PAIRS = (0, 1, 2, 3), ((0, 1), (2, 3))


def test_each_rank_makes_its_own_stages(pool: Pool) -> None:
    found = pool.run(parts.materialised, ranks=ALL)
    assert sum(found) == parts.bytes_of(Net())  # nothing twice, nothing left out


def test_saved_on_four_ranks(pool: Pool, tmp_path: Path) -> None:
    """Goes on over two ranks, in the plain model, over ranks whose model begins on the meta device; saved again from
    two, over four."""
    first, second = tmp_path / "first", tmp_path / "second"
    losses = pool.run(parts.saved, first, ranks=ALL)
    for pair, meta in zip(PAIRS, (False, True), strict=True):
        pool.start(parts.gone_on, first, meta, ranks=pair)
    found = [each for pair in PAIRS for each in pool.results(pair)]
    pool.run(parts.resaved, first, second, ranks=PAIRS[0])
    found += pool.run(parts.gone_on, second, False, ranks=ALL)
    plain = Net()
    optimizer = adam(plain)
    assert fxpipe.load_checkpoint(second, plain, optimizer) == {"step": 3}
    found.append(train(plain, optimizer, range(3, 23)))
    for one in (*losses, *found):
        torch.testing.assert_close(one, losses[0], rtol=1e-9, atol=0)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
def test_a_model_that_fits_on_no_rank(pool: Pool) -> None:
    """The peak of each rank is within a tenth of what its own parameters and gradients take."""
    width, depth = 1024, 12
    layer = 4 * width * width
    limit = int(1.1 * 2 * depth * layer)
    assert limit < len(ALL) * depth * layer  # what the parameters of the whole model take alone
    assert max(pool.run(parts.stays_within, width, depth, ranks=ALL)) < limit


def test_a_loop_with_all_that_users_do(pool: Pool) -> None:
    pool.run(parts.looped, ranks=ALL)
