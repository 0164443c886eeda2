"""The choice of a minimum cut is the cheapest of all choices, tried one by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.passes.backward.minimum_cut import Computation, run_again

COSTS = st.sampled_from([None, 0, 1, 2, 7, 20])


@st.composite
def forwards(draw: st.DrawFn) -> tuple[list[Computation], list[str], dict[str, int | None]]:
    """Up to six computations, the values that backward needs, and what keeping values costs."""
    keeping: dict[str, int | None] = {"x": draw(st.integers(0, 9)), "y": draw(st.integers(0, 9))}
    computations = []
    for place in range(draw(st.integers(1, 6))):
        reads = draw(st.lists(st.sampled_from(list(keeping)), min_size=1, max_size=3, unique=True))
        makes = tuple(f"v{place}_{part}" for part in range(draw(st.integers(1, 2))))
        computations.append(Computation(makes, tuple(reads), draw(COSTS)))
        keeping |= {value: draw(COSTS) for value in makes}
    needed = draw(st.lists(st.sampled_from(list(keeping)), min_size=1, max_size=4, unique=True))
    return computations, needed, keeping


def cost(
    computations: Sequence[Computation],
    needed: Collection[str],
    keeping: Mapping[str, int | None],
    again: Collection[int],
) -> int | None:
    """What it costs to run these computations again, and to keep all else that is needed; None if that cannot be."""
    wanted = {*needed, *(value for place in again for value in computations[place].reads)}
    kept = wanted - {value for place in again for value in computations[place].makes}
    costs = [*(computations[place].price for place in again), *(keeping[value] for value in kept)]
    return None if None in costs else sum(one for one in costs if one is not None)


@given(forwards())
def test_it_is_the_cheapest_of_all_choices(made: tuple[list[Computation], list[str], dict[str, int | None]]) -> None:
    computations, places = made[0], range(len(made[0]))
    every = [(cost(*made, one), len(one)) for one in chain(*(combinations(places, k) for k in range(len(places) + 1)))]
    possible = [(found, count) for found, count in every if found is not None]
    if not possible:
        with pytest.raises(ValueError, match="neither be kept nor be computed again"):
            run_again(*made)
        return
    again = run_again(*made)
    assert (cost(*made, again), len(again)) == min(possible)
    assert all(computations[place].price is not None for place in again)
