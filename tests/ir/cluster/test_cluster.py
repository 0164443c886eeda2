"""Clusters: what a link is, what is refused, and the JSON round trip."""

import pytest

from fxpipe.ir.cluster import cluster as clusters
from fxpipe.ir.cluster.cluster import Cluster, Device, Link, Switch, check, dump, link, load

GPU = Device("cuda:0", memory=16 * 10**9, flops=15e12, bandwidth=900e9, server="a")


def two_servers() -> Cluster:
    devices = (GPU, Device("cuda:1", GPU.memory, 15e12, 900e9, "a"), Device("cuda:2", GPU.memory, 15e12, 900e9, "b"))
    links = (Link(("a", "a"), 12e9, 1e-5), Link(("a", "b"), 1e9, 5e-5), Link(("cuda:0", "cuda:1"), 50e9, 1e-6))
    return Cluster(devices, links)


def test_a_pair_takes_its_own_link_or_that_of_its_servers():
    cluster = two_servers()
    assert link(cluster, "cuda:0", "cuda:1").bandwidth == 50e9
    assert link(cluster, "cuda:2", "cuda:0").bandwidth == 1e9


def test_print():
    assert str(two_servers()) == (
        "device    server    memory    compute     memory bandwidth\n"
        "cuda:0    a         16 GB     15 Tflop/s  900 GB/s\n"
        "cuda:1    a         16 GB     15 Tflop/s  900 GB/s\n"
        "cuda:2    b         16 GB     15 Tflop/s  900 GB/s\n"
        "\n"
        "link             bandwidth    latency\n"
        "a - a            12 GB/s      10 us\n"
        "a - b            1 GB/s       50 us\n"
        "cuda:0 - cuda:1  50 GB/s      1 us"
    )


def test_json_round_trip():
    assert load(dump(two_servers())) == two_servers()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"devices": [{"label": "x"}], "links": []}'])
def test_text_that_is_not_a_cluster(text):
    with pytest.raises(ValueError, match=r"not JSON|: write"):
        load(text)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (Cluster((), ()), "no devices"),
        (Cluster((GPU, GPU), ()), "'cuda:0' stands for two"),
        (Cluster((Device("cuda:0", 0, 1.0, 1.0),), ()), "not positive"),
        (Cluster((GPU,), (Link(("a", "c"), 1.0, 0.0),)), "a - c joins something"),
        (Cluster((GPU, Device("cuda:1", 1, 1.0, 1.0, "b")), ()), "no link joins cuda:0 and cuda:1"),
    ],
)
def test_refused(cluster, message):
    with pytest.raises(ValueError, match=message):
        check(cluster)


def test_local_devices_are_joined_by_assumption():
    cluster = Cluster.of(["cuda:0", "cpu:0"])
    assert cluster.device("cpu:0").flops == clusters.ASSUMED_CPU_WORKER.flops
    assert link(cluster, "cuda:0", "cpu:0") == clusters.ASSUMED_LINK


def test_switches_join_what_no_link_does():
    switches = (Switch("a", ("cuda:0", "cuda:1"), 50e9, 1e-6), Switch("network", ("a", "b"), 1e9, 5e-5, into=5e8))
    cluster = Cluster(two_servers().devices, (), switches)
    check(cluster)
    assert link(cluster, "cuda:1", "cuda:0") == Link(("cuda:1", "cuda:0"), 50e9, 1e-6)
    assert link(cluster, "cuda:1", "cuda:2").bandwidth == 5e8
    assert load(dump(cluster)) == cluster
    assert str(cluster).splitlines()[-1].split() == ["network", "a,", "b", "1", "GB/s", "50", "us"]


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ((Switch("a", ("cuda:0", "cuda:9"), 1, 0),), "joins 'cuda:9', which is not"),
        ((Switch("a", ("cuda:0",), 1, 0), Switch("b", ("cuda:0",), 1, 0)), "behind two switches"),
        ((Switch("x", ("y",), 1, 0), Switch("y", ("x",), 1, 0)), "behind itself"),
        ((Switch("a", ("cuda:0",), 0, 0),), "not positive"),
        ((Switch("cuda:0", ("cuda:1",), 1, 0),), "a device and a switch"),
        ((Switch("a", (), 1, 0),), "joins nothing"),
        ((Switch("a", ("cuda:0",), 1, 0), Switch("a", ("cuda:1",), 1, 0)), "the same name"),
        ((Switch("a", ("cuda:0", "cuda:1"), 1, 0),), "no link joins cuda:0 and cuda:2"),
    ],
)
def test_bad_switches(switches, message):
    with pytest.raises(ValueError, match=message):
        check(Cluster(two_servers().devices, (), switches))
