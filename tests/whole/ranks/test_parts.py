"""What a run over ranks needs beside steps: memory for its own stages alone, checkpoints, and the loop around it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import fxpipe
from tests.training.test_checkpoint import Net, adam, same, train
from tests.whole.ranks import parts
from tests.whole.ranks.pool import Pool

ALL, PAIRS = (0, 1, 2, 3), ((0, 1), (2, 3))


def test_each_rank_makes_its_own_stages(pool: Pool) -> None:
    found = pool.run(parts.materialised, ranks=ALL)
    assert sum(found) == parts.bytes_of(Net())  # nothing twice, nothing left out


@pytest.mark.slow
def test_saved_on_four_ranks(pool: Pool, tmp_path: Path) -> None:
    """Goes on over two ranks, in the plain model, over ranks whose model begins on the meta device; saved again from
    two, over four. Parameters, buffers and what the optimizer keeps are the same to the last bit, and so are the next
    twenty losses; the plain model adds up the gradients of its shared weight in another order."""
    first, second = tmp_path / "first", tmp_path / "second"
    state, losses = parts.put_together(pool.run(parts.saved, first, ranks=ALL))
    for pair, meta in zip(PAIRS, (False, True), strict=True):
        pool.start(parts.gone_on, first, meta, ranks=pair)
    found = [parts.put_together(pool.results(pair)) for pair in PAIRS]
    pool.run(parts.resaved, first, second, ranks=PAIRS[0])
    found.append(parts.put_together(pool.run(parts.gone_on, second, False, ranks=ALL)))
    for one in found:
        same(one, (state, losses))
    plain = Net()
    optimizer = adam(plain)
    assert fxpipe.load_checkpoint(second, plain, optimizer) == {"step": 3}
    same(parts.held(plain, optimizer), state)
    torch.testing.assert_close(train(plain, optimizer, range(3, 23)), losses, rtol=1e-12, atol=0)


@pytest.mark.slow
def test_saved_while_training_goes_on(pool: Pool, tmp_path: Path) -> None:
    """What is saved is what was there when it was asked for; twenty steps later others begin there."""
    wanted = parts.put_together(pool.run(parts.saved_beside, tmp_path, ranks=PAIRS[0]))
    same(parts.put_together(pool.run(parts.gone_on, tmp_path / "whole", False, ranks=PAIRS[0])), wanted)


@pytest.mark.slow
def test_each_rank_loads_what_its_stages_use(pool: Pool, tmp_path: Path) -> None:
    """The page's recipe over ranks: also after a restart in an epoch, losses are those of the plain model."""
    pool.run(parts.loads_its_own, Path(__file__).parents[3] / "docs" / "guides" / "processes.md", tmp_path, ranks=ALL)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of memory from /proc")
def test_a_model_that_fits_on_no_rank(pool: Pool) -> None:
    """No rank may take the memory of the model's parameters; the peak of each is within a tenth of what its own
    parameters and gradients take."""
    assert pool.run(parts.stays_within, 1024, 20, ranks=ALL) == [pytest.approx(1, rel=0.1)] * len(ALL)


@pytest.mark.slow
def test_a_loop_with_all_that_users_do(pool: Pool) -> None:
    pool.run(parts.looped, ranks=ALL)
