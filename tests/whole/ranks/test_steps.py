"""Steps over ranks are the model's, the whole way from the user's call; `test_product` has all models and schedules."""

from __future__ import annotations

import pytest

from tests.helpers.marks import mostly_slow
from tests.whole.ranks import cases
from tests.whole.ranks.pool import Pool

ALL = (0, 1, 2, 3)
PAIRS = ((0, 1), (2, 3))
CHUNKS = 4  # of 7 samples: 2, 2, 2, 1; of 2 samples: 1, 1


PIPES = mostly_slow([("tied weight", "1f1b"), ("dropout", "zb-v")], ("tied weight", "1f1b").__eq__)


@pytest.mark.parametrize(("name", "schedule"), PIPES)
def test_pipe(pool: Pool, name: str, schedule: str) -> None:
    """Over 2 ranks where every rank has the whole batch, over 4 where each passes what it uses."""
    for pair in PAIRS:
        pool.start(cases.pipe_is_the_model, name, schedule, "except_last", CHUNKS, "everywhere", ranks=pair)
    for pair in PAIRS:
        pool.results(pair)
    pool.run(cases.pipe_is_the_model, name, schedule, "always", CHUNKS, "used", ranks=ALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "checkpoint"),
    [("tied weight", "1f1b", "always"), ("dropout", "zb-h1", "never"), ("skip ladder", "zb-v", "except_last")],
)
def test_pipe_with_backward_as_code(pool: Pool, name: str, schedule: str, checkpoint: str) -> None:
    pool.run(cases.pipe_is_the_model, name, schedule, checkpoint, CHUNKS, "used", "code", ranks=(0, 1))


@pytest.mark.parametrize("small", mostly_slow([2**18, 100, 0], (100).__eq__))
def test_pipe_whose_ranks_share_little_memory(pool: Pool, small: int) -> None:
    pool.run(cases.crowded_pipe_is_the_model, "skip ladder", "interleaved", small, ranks=ALL)
