"""Torch's schedules drive our stages."""

from __future__ import annotations

from tests.whole.ranks import driven
from tests.whole.ranks.pool import Pool

PAIRS = ((0, 1), (2, 3))


def test_gradients_are_the_plain_models(pool: Pool) -> None:
    for names in (("gpipe", "1f1b"), ("interleaved",)):
        busy = list(zip(names, PAIRS, strict=False))
        for name, pair in busy:
            pool.start(driven.driven, name, ranks=pair)
        for _, pair in busy:
            pool.results(pair)
