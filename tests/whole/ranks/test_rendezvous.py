"""Steps over a process group with NCCL's rules: nothing is buffered, calls of a communicator run in order."""

from __future__ import annotations

import pytest

from tests.helpers.rendezvous_group import EAGER, LAZY
from tests.whole.ranks import rendezvous
from tests.whole.ranks.pool import Pool


@pytest.mark.parametrize("mode", [LAZY, EAGER])
@pytest.mark.parametrize(
    ("schedule", "count", "replicas"), [("gpipe", 2, None), ("zb-h1", 3, None), ("1f1b", 3, (2, 1))]
)
def test_steps(pool: Pool, mode: str, schedule: str, count: int, replicas: tuple[int, ...] | None) -> None:
    pool.run(rendezvous.is_the_model, mode, "skip ladder", schedule, "except_last", replicas, ranks=tuple(range(count)))
