"""Shares of samples are those that the engines deal."""

from __future__ import annotations

from itertools import product

import pytest

from fxpipe.engines.common.replica_routing import pieces
from fxpipe.ir.replica_shares import dealt, fewest, in_common, largest_share, uneven
from fxpipe.runtime.microbatch import split_sizes


@pytest.mark.parametrize("samples", range(1, 12))
def test_as_the_engines_deal(samples):
    for here, there in product(range(1, 9), repeat=2):
        sizes = split_sizes(samples, here)
        assert dealt(samples, here) == sizes + (0,) * (here - len(sizes))
        assert largest_share(samples, here) == sizes[0] / samples
        assert tuple(in_common(samples, here, there)) == pieces(samples, here, there, whole=False, forward=True)


@pytest.mark.parametrize("samples", [None, 1, 5, 8, 24])
def test_the_fewest_replicas_for_a_share(samples):
    for share in (1.0, 0.9, 0.5, 0.34, 0.3, 0.2, 0.125, 0.05, 0.01, 0.0, -1.0):
        enough = [r for r in range(1, 200) if largest_share(samples, r) <= share]
        assert fewest(samples, share) == (enough[0] if enough else 0)


def test_says_how_they_differ():
    assert uneven(8, 4) == uneven(8, 1) == ""
    assert uneven(7, 4) == "2 of 7 samples on 3 replicas, 1 on 1"
