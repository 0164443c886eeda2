"""The presets are sound, and survive being written to JSON."""

from itertools import pairwise

import pytest

from fxpipe.ir.cluster.cluster import check, dump, link, load
from fxpipe.ir.cluster.network import ring
from fxpipe.ir.cluster.published_clusters import PRESETS, preset

SIZES = {"A": 16, "B": 16, "C": 16, "p100": 16, "k80": 64, "p40": 8, "a100": 8, "h100": 8, "b200": 8}


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name):
    cluster = preset(name)
    check(cluster)
    assert len(cluster.devices) == SIZES[name]
    assert load(dump(cluster)) == cluster
    assert "GB/s" in str(cluster)


def test_unknown():
    with pytest.raises(ValueError, match="no cluster 'D'; there are A, B, C"):
        preset("D")
    with pytest.raises(ValueError, match="'x' is no number of devices: write k80:8"):
        preset("k80:x")
    with pytest.raises(ValueError, match="there are 16 devices, so 17 of them cannot be had"):
        preset("A:17")


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("name", ["p100", "k80"])
def test_flexflow_clusters_of_any_size(name, count):
    cluster = preset(f"{name}:{count}")
    check(cluster)
    assert len(cluster.devices) == count
    assert len({device.server for device in cluster.devices}) == max(1, count // 4)
    whole = preset(name)
    if count <= len(whole.devices):
        assert all(link(cluster, *ends) == link(whole, *ends) for ends in pairwise(cluster.labels))


def test_published_bandwidths():
    """NVLink, and 100 Gb/s between nodes; PCIe, and 56 Gb/s between nodes."""
    p100, k80 = preset("p100"), preset("k80")
    assert [link(p100, "P100:0", f"P100:{i}").bandwidth for i in (1, 3, 4, 15)] == [20e9, 20e9, 12.5e9, 12.5e9]
    assert [link(k80, "K80:0", f"K80:{i}").bandwidth for i in (1, 3, 4, 63)] == [12e9, 12e9, 7e9, 7e9]


@pytest.mark.parametrize(
    ("name", "card", "within"), [("a100", 25e9, 300e9), ("h100", 50e9, 450e9), ("b200", 50e9, 900e9)]
)
def test_nodes_of_eight(name, card, within):
    cluster = preset(f"{name}:24")
    check(cluster)
    assert len({device.server for device in cluster.devices}) == 3
    assert link(cluster, *cluster.labels[:2]).bandwidth == within
    assert link(cluster, cluster.labels[0], cluster.labels[23]).bandwidth == card
    assert ring(cluster, range(24))[0] == 8 * card
