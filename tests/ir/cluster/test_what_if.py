"""Clusters with one thing changed."""

from __future__ import annotations

import pytest

from fxpipe.ir.cluster.cluster import Cluster, Device, Link, check, link
from fxpipe.ir.cluster.published_clusters import PRESETS, dapple_a, dapple_b, preset
from fxpipe.ir.cluster.what_if import fewer, one_more, one_more_server, widened

THREE = Cluster(
    tuple(Device(f"cuda:{i}", 1, 1, 1) for i in range(3)),
    (Link(("cuda:0", "cuda:1"), 5, 1), Link(("cuda:0", "cuda:2"), 6, 1), Link(("cuda:1", "cuda:2"), 7, 1)),
)


@pytest.mark.parametrize("name", PRESETS)
def test_one_more_device_is_joined_like_the_last(name: str) -> None:
    cluster = preset(name)
    more = one_more(cluster)
    check(more)
    *_, last, new = more.labels
    assert len(more.devices) == len(cluster.devices) + 1
    assert link(more, more.labels[0], new).bandwidth == link(more, more.labels[0], last).bandwidth


def test_it_is_in_the_last_server_or_in_one_of_its_own() -> None:
    assert one_more(dapple_a()).devices[-1].server == "server 1"
    assert one_more(dapple_b()).devices[-1].server == "server 16"


@pytest.mark.parametrize("name", ["A", "B", "p100", "k80"])
def test_one_more_server_is_like_the_last(name: str) -> None:
    cluster = preset(name)
    more = one_more_server(cluster)
    check(more)
    new = more.devices[-1]
    assert new.server not in {device.server for device in cluster.devices}
    each = [device.server for device in more.devices].count(new.server)
    assert len(more.devices) == len(cluster.devices) + each
    for one, twin in ((cluster.labels[-1], more.labels[-1]), (cluster.labels[-each], more.labels[-each])):
        assert link(more, more.labels[0], twin).bandwidth == link(more, more.labels[0], one).bandwidth
    if each > 1:
        assert link(more, *more.labels[-2:]).bandwidth == link(cluster, *cluster.labels[-2:]).bandwidth


def test_servers_joined_by_links() -> None:
    devices = tuple(Device(f"cuda:{i}", 1, 1, 1, f"server {i // 2}") for i in range(4))
    within = tuple(Link((name, name), 9, 1) for name in ("server 0", "server 1"))
    more = one_more_server(Cluster(devices, (*within, Link(("server 0", "server 1"), 5, 1))))
    check(more)
    assert more.labels[-2:] == ("cuda:4", "cuda:5")
    assert [link(more, one, "cuda:5").bandwidth for one in more.labels[:5]] == [5, 5, 5, 5, 9]
    with pytest.raises(ValueError, match="nothing joins 'server 0' to other servers"):
        one_more_server(Cluster(devices[:2], within[:1]))


def test_links_between_devices() -> None:
    more = one_more(THREE)
    check(more)
    assert [link(more, f"cuda:{i}", "cuda:3").bandwidth for i in range(3)] == [6, 7, 7]


def test_fewer_devices_keep_what_joins_them() -> None:
    two = fewer(THREE, 2)
    check(two)
    assert two == Cluster(THREE.devices[:2], THREE.links[:1])
    one_server = fewer(dapple_a(), 8)
    check(one_server)
    assert [switch.name for switch in one_server.switches] == ["server 0", "network"]
    assert fewer(dapple_a(), 16) == dapple_a()


def test_twice_the_bandwidth() -> None:
    assert link(widened(THREE), "cuda:0", "cuda:1").bandwidth == 10
    wide = widened(dapple_a(all_reduce=1e9))
    assert wide.switches[-1].all_reduce == 2e9
    assert link(wide, "V100:0", "V100:8").bandwidth == 2 * 3.125e9
