"""The least sum is that of all choices, one by one."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.planning.tensor_parallel import least_sum as module
from fxpipe.planning.tensor_parallel.least_sum import TooLarge, least_sum


@given(st.integers(0, 10**6), st.integers(1, 7), st.floats(0, 1))
def test_it_equals_enumeration(seed: int, variables: int, dense: float) -> None:
    draw = np.random.default_rng(seed)
    counts = [int(draw.integers(1, 4)) for _ in range(variables)]
    alone = [draw.integers(0, 9, size=count).astype(float) for count in counts]
    pairs = {
        (v, w): draw.integers(0, 9, size=(counts[v], counts[w])).astype(float)
        for w in range(variables)
        for v in range(w)
        if draw.random() < dense
    }

    def total(choice: tuple[int, ...]) -> float:
        own = sum(costs[at] for costs, at in zip(alone, choice, strict=True))
        return float(own + sum(costs[choice[v], choice[w]] for (v, w), costs in pairs.items()))

    least, chosen = least_sum(alone, pairs)
    assert least == total(chosen) == min(map(total, product(*map(range, counts))))


def test_a_chain_of_thousands_is_no_trouble() -> None:
    step = np.array([[0.0, 2.0], [2.0, 0.0]])
    alone = [np.array([1.0, 0.0]) if v % 2 else np.array([0.0, 1.0]) for v in range(3000)]
    least, chosen = least_sum(alone, {(v, v + 1): step for v in range(2999)})
    assert least == 1500
    assert len(set(chosen)) == 1


def test_what_is_too_entangled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 100)
    pairs = {(v, w): np.ones((4, 4)) for w in range(6) for v in range(w)}
    with pytest.raises(TooLarge, match=r"a table of 5 choices would have 1,024 entries|entries"):
        least_sum([np.zeros(4)] * 6, pairs)
