"""Values of inputs are those of the whole batch on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.marks import mostly_slow
from tests.whole.ranks import input_values
from tests.whole.ranks.pool import Pool

WAYS: dict[str, dict[str, Any]] = {
    "1f1b": {"devices": 2, "chunks": 4, "schedule": "1f1b"},
    "code": {"devices": 2, "chunks": 3, "schedule": "zb-h1", "backward": "code"},
    "replicas": {"devices": 2, "chunks": 2, "replicas": (2,)},
}


@pytest.mark.parametrize("way", mostly_slow(WAYS, "code".__eq__))
@pytest.mark.parametrize("name", mostly_slow(["short_cut", "longest", "either"], "short_cut".__eq__))
def test_steps_are_those_of_the_model(pool: Pool, name: str, way: str) -> None:
    pool.run(input_values.as_the_model, name, WAYS[way], ranks=(0, 1))


@pytest.mark.slow
def test_the_models_exception(pool: Pool) -> None:
    pool.run(input_values.models_exception, ranks=(0, 1))
