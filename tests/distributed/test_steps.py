"""A step over ranks is the model's: loss, outputs, all gradients and buffers, for every model under every schedule.

By default a few models run, chosen for what crosses between their stages, each in some configurations that go round;
`slow` runs all schedules for each model, over 2 and over 4 ranks.
"""

from __future__ import annotations

from itertools import cycle, islice

import pytest

from tests.distributed import cases
from tests.distributed.pool import Pool
from tests.models import MODELS
from tests.test_steps import CHECKPOINTS, NAMES

ALL = (0, 1, 2, 3)
PAIRS = ((0, 1), (2, 3))
CHUNKS = 4  # of 7 samples: 2, 2, 2, 1; of 2 samples: 1, 1
CONFIGS = list(zip(NAMES, cycle(CHECKPOINTS), strict=False))
# What crosses between ranks: skips, tied weights, random numbers, views, masks, constants, numbers; and buffers.
FEW = (
    "skip ladder", "tied transformer", "unused", "batch norm", "transformer with dropout", "views", "numbers", "masked",
    "encoder-decoder", "counter", "frozen", "mixed precision",
)  # fmt: skip


@pytest.mark.parametrize(("name", "schedule"), [("tied weight", "1f1b"), ("dropout", "zb-v")])
def test_pipe(pool: Pool, name: str, schedule: str) -> None:
    """Over 2 ranks where every rank has the whole batch, over 4 where each passes what it uses."""
    for pair in PAIRS:
        pool.start(cases.pipe_is_the_model, name, schedule, "except_last", CHUNKS, "everywhere", ranks=pair)
    for pair in PAIRS:
        pool.results(pair)
    pool.run(cases.pipe_is_the_model, name, schedule, "always", CHUNKS, "used", ranks=ALL)


def test_every_schedule(pool: Pool) -> None:
    """Each model of a few in two configurations over 2 ranks and in one over 4, so that every schedule occurs."""
    around = cycle(CONFIGS)
    for some in zip(FEW[::2], FEW[1::2], strict=True):
        for pair, name in zip(PAIRS, some, strict=True):
            pool.start(cases.engine_is_the_model, name, list(islice(around, 2)), CHUNKS, (8, 7), ranks=pair)
        assert [pool.results(pair) for pair in PAIRS] == [[2, 2], [2, 2]]
        for name in some:
            assert pool.run(cases.engine_is_the_model, name, list(islice(around, 1)), CHUNKS, (7,)) == [1] * 4


@pytest.mark.slow
def test_every_model_and_schedule_over_2_ranks(pool: Pool) -> None:
    names = list(MODELS)
    for at in range(0, len(names), 2):
        busy = list(zip(PAIRS, names[at : at + 2], strict=False))
        for pair, name in busy:
            pool.start(cases.engine_is_the_model, name, CONFIGS, CHUNKS, (7,), ranks=pair)
        for pair, name in busy:
            assert min(pool.results(pair)) >= 1, name


@pytest.mark.slow
def test_every_model_and_schedule_over_4_ranks(pool: Pool) -> None:
    for at, name in enumerate(MODELS):  # in every other configuration each: four ranks have two cores
        assert min(pool.run(cases.engine_is_the_model, name, CONFIGS[at % 2 :: 2], CHUNKS, (7,))) >= 1, name
