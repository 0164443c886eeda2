"""With chunks=1 nothing is cut, over ranks too."""

from __future__ import annotations

import pytest

from tests.helpers.marks import mostly_slow
from tests.whole.ranks import uncut
from tests.whole.ranks.pool import Pool
from tests.whole.test_uncut import BODIES


@pytest.mark.parametrize("name", mostly_slow([body.__name__ for body in BODIES], ["padded"].__contains__))
def test_calls_and_steps_are_those_of_the_model(pool: Pool, name: str) -> None:
    pool.run(uncut.as_the_model, name, ranks=(0, 1))
