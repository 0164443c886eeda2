"""DAPPLE's placement policies, by hand."""

from fxpipe.ir.cluster.cluster import Cluster, Device
from fxpipe.planning.hybrid.device_placement import placements, positions, servers


def test_the_policies():
    assert placements((4, 4), (0, 0), 2) == [(2, 0), (1, 1)]  # nothing is in use: nothing to append to
    assert placements((4, 4), (3, 0), 2) == [(0, 2), (1, 1)]
    assert placements((4, 4), (2, 2), 3) == [(2, 1)]
    assert placements((1, 1, 1), (1, 0, 0), 2) == [(0, 1, 1)]
    assert placements((2, 2), (1, 0), 4) == []


def test_policies_go_on_to_other_servers():
    assert placements((4, 2), (1, 0), 4) == [(2, 2), (3, 1)]


def test_devices_need_not_stand_by_server():
    cluster = Cluster(tuple(Device(f"g{i}", 1, 1, 1, "ab"[i % 2]) for i in range(4)))
    groups = servers(cluster)
    assert groups == [[0, 2], [1, 3]]
    assert positions(groups, (1, 0), (1, 2)) == (1, 2, 3)
