"""Models in which data decides how many rows there are, over ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.marks import mostly_slow
from tests.whole.ranks import selected_rows
from tests.whole.ranks.pool import Pool

WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {"devices": 2, "chunks": 4, "schedule": "1f1b"},
    "code": {"devices": 2, "chunks": 3, "schedule": "zb-h1", "backward": "code"},
    "replicas": {"devices": 2, "chunks": 2, "replicas": (2,)},
}


@pytest.mark.parametrize("way", mostly_slow(WAYS, "replicas".__eq__))
@pytest.mark.parametrize("name", mostly_slow(["labels", "put_back", "experts", "sequences"], "labels".__eq__))
def test_steps_are_those_of_the_model(pool: Pool, name: str, way: str) -> None:
    pool.run(selected_rows.as_the_model, name, WAYS[way], ranks=(0, 1))


@pytest.mark.slow
def test_what_is_returned(pool: Pool) -> None:
    pool.run(selected_rows.what_is_returned, ranks=(0, 1))
