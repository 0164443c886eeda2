"""Functions that forward calls and that are kept whole by themselves, over ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.marks import mostly_slow
from tests.whole.ranks import functions_kept_whole
from tests.whole.ranks.pool import Pool

WHOLE = "of the whole batch"
WAYS: dict[str, dict[str, Any]] = {
    "sum": {"devices": 2, "chunks": 2, "reduce": "sum"},
    WHOLE: {"devices": 2, "chunks": 2},
    "code": {"devices": 2, "chunks": 2, "reduce": "sum", "schedule": "1f1b", "backward": "code"},
    "replicas": {"devices": 2, "chunks": 2, "reduce": "sum", "replicas": (2,)},
}
KINDS = ("ByProperty", "Tied", "ByGlobal", "ByPartial", "Decorated", "InMethod", "Two", "OfUnknownSize")
REFUSED = ("Tied", "Two")  # of the whole batch: with the weights of a layer, or random numbers
ROWS = [(kind, way) for kind in KINDS for way in WAYS if way != WHOLE or kind not in REFUSED]


@pytest.mark.parametrize(("kind", "way"), mostly_slow(ROWS, [("ByProperty", WHOLE), ("Tied", "replicas")].__contains__))
def test_steps_are_those_of_the_model(pool: Pool, kind: str, way: str) -> None:
    pool.run(functions_kept_whole.as_the_model, kind, WAYS[way], ranks=(0, 1))
