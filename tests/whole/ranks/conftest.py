"""One pool of ranks for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.whole.ranks.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()
