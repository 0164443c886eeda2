"""A group takes as long as its devices do at the same time."""

from __future__ import annotations

import pytest

from fxpipe.ir.cluster import cluster as clusters
from fxpipe.ir.cluster.cluster import Cluster, link
from fxpipe.ir.cluster.device_groups import grouped, groups, most_in_a_group, slowest_ring
from fxpipe.ir.cluster.network import all_reduce, split_concat, way
from fxpipe.ir.cluster.published_clusters import P100, dapple_a, h100s, k80s, servers

CLUSTERS = {
    "cards": h100s(3),
    "one card": dapple_a(),
    "tree": k80s(3),
    "links": Cluster.of([f"cuda:{i}" for i in range(8)]),
    "odd": servers(2, 7, P100, 20e9, 5e9),
}


def together(cluster: Cluster, pairs: list[tuple[int, int]]) -> tuple[float, float]:
    """The latency, and the seconds per byte if each pair sends as many bytes at the same time: by ports."""
    used: dict[tuple[str, str, str], float] = {}
    for a, b in pairs:
        for key, bandwidth in way(cluster, cluster.labels[a], cluster.labels[b]):
            used[key] = used.get(key, 0.0) + 1 / bandwidth
    return max(link(cluster, cluster.labels[a], cluster.labels[b]).latency for a, b in pairs), max(used.values())


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_transfers_of_all_devices_of_a_group_run_at_once(name: str, size: int) -> None:
    cluster = CLUSTERS[name]
    made, members = grouped(cluster, size), groups(cluster, size)
    clusters.check(made)
    assert made.labels == tuple(cluster.labels[own[0]] for own in members)
    for a in range(len(members)):
        for b in range(len(members)):
            if a != b:
                rate = split_concat(made, [a], [b])
                latency, per_byte = together(cluster, list(zip(members[a], members[b], strict=True)))
                assert rate.latency == latency
                # A tree's port that only a part of a group shares counts as if the whole group shared it.
                assert rate.per_byte == pytest.approx(per_byte) or (name == "tree" and rate.per_byte >= per_byte)


def test_rings_of_all_devices_of_a_group_share_a_servers_card() -> None:
    slow = dapple_a()
    rate, one = all_reduce(grouped(slow, 4), [0, 2]), all_reduce(slow, [0, 8])
    assert rate.per_byte == pytest.approx(4 * one.per_byte)
    fast = h100s(2)
    assert all_reduce(grouped(fast, 4), [0, 2]).per_byte == pytest.approx(all_reduce(fast, [0, 8]).per_byte)


def test_groups_are_within_servers() -> None:
    cluster = CLUSTERS["odd"]
    assert groups(cluster, 3) == ((0, 1, 2), (3, 4, 5), (7, 8, 9), (10, 11, 12))
    assert most_in_a_group(cluster) == 7
    assert grouped(cluster, 1) is cluster
    with pytest.raises(ValueError, match="no server has 8 devices"):
        grouped(cluster, 8)


def test_devices_of_several_kinds_share_no_op() -> None:
    two = Cluster((*dapple_a().devices, *k80s(1).devices))
    with pytest.raises(ValueError, match="several kinds"):
        grouped(two, 2)


def test_the_slowest_group_counts() -> None:
    cluster = k80s(1)
    assert slowest_ring(cluster, [(0, 1), (0, 2)]) == all_reduce(cluster, (0, 2))
