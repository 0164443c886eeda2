"""Values that go from groups of one size to groups of another."""

from __future__ import annotations

import pytest

from fxpipe.ir.cluster.device_groups import grouped, groups
from fxpipe.ir.cluster.network import hand_over, split_concat
from fxpipe.ir.cluster.published_clusters import h100s


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(("before", "after"), [((0,), (1,)), ((0,), (1, 2, 3)), ((1, 2), (0, 3)), ((0, 1, 2), (3,))])
def test_equal_groups_are_devices_of_the_cluster_of_groups(
    size: int, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    cluster = h100s(4)
    known, small = groups(cluster, size), grouped(cluster, size)
    there, back = hand_over(cluster, [known[at] for at in before], [known[at] for at in after], samples=6)
    for found, ends in ((there, (before, after)), (back, (after, before))):
        assert found.seconds(1e6) == pytest.approx(split_concat(small, *ends, samples=6).seconds(1e6), rel=1e-12)


def test_a_device_of_a_smaller_group_serves_several() -> None:
    """Two devices of each of two servers: each card carries what two of the four take."""
    cluster = h100s(2)
    one, _ = hand_over(cluster, [(0,)], [(8,)])
    there, back = hand_over(cluster, [(0, 1)], [(8, 9, 10, 11)])
    assert there.seconds(1e9) == pytest.approx(2 * one.seconds(1e9), rel=1e-3)
    assert back.seconds(1e9) == pytest.approx(there.seconds(1e9))
    there, _ = hand_over(cluster, [(0, 1, 2, 3)], [(8, 9)])
    assert there.seconds(1e9) == pytest.approx(one.seconds(1e9))
