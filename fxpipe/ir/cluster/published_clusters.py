"""Clusters of published experiments. Figures are nominal, each with its source. Programs reach less, so presets of
several servers take the effective bandwidth between servers as an argument.

    preset   devices                        within a server   between servers
    dapple_a 2 servers of 8 V100            NVLink            25 Gb/s Ethernet
    dapple_b 16 servers of 1 V100           -                 25 Gb/s Ethernet
    dapple_c 16 servers of 1 V100           -                 10 Gb/s Ethernet
    p100s    4 nodes of 4 P100              NVLink            100 Gb/s EDR InfiniBand
    k80s     16 nodes of 4 K80 (GPUs)       PCIe switches     56 Gb/s InfiniBand
    p40s     1 box of 8 P40                 PCIe              -
    h100s    1 box of 8 H100                NVLink            -
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .cluster import Cluster, Device, Switch, check
from .what_if import fewer

GB = 10**9

# Memory, single-precision FLOP/s and memory bandwidth, from NVIDIA's data sheets. A K80 is a board of two GPUs: this is
# one of them. Of an H100 SXM the FLOP/s are those of TF32 on tensor cores without sparsity.
V100 = Device("V100", memory=16 * GB, flops=15.7e12, bandwidth=900e9)
P100 = Device("P100", memory=16 * GB, flops=10.6e12, bandwidth=732e9)
K80 = Device("K80", memory=12 * GB, flops=4.37e12, bandwidth=240e9)
P40 = Device("P40", memory=24 * GB, flops=11.8e12, bandwidth=346e9)
H100 = Device("H100", memory=80 * GB, flops=494e12, bandwidth=3.35e12)

GBIT = 125e6  # bytes per second
ETHERNET_LATENCY = 50e-6  # assumed: a kernel's TCP stack; none of the papers gives one
INFINIBAND_LATENCY = 2e-6  # assumed
NVLINK_LATENCY = 2e-6  # assumed
PCIE_LATENCY = 10e-6  # assumed


def servers(
    count: int,
    each: int,
    kind: Device,
    within: float,
    between: float,
    within_latency: float = 0.0,
    between_latency: float = 0.0,
    all_reduce: float | None = None,
) -> Cluster:
    """`count` servers of `each` devices. Rates are in bytes per second:

    - `within`: of each device's port in its server.
    - `between`: of each server's network card.
    - `all_reduce`: that a ring over the network cards reaches, if that is another rate.
    """
    names = [[f"{kind.label}:{s * each + i}" for i in range(each)] for s in range(count)]
    devices = tuple(replace(kind, label=name, server=f"server {s}") for s in range(count) for name in names[s])
    inside = tuple(Switch(f"server {s}", tuple(names[s]), within, within_latency) for s in range(count) if each > 1)
    between_all = Switch(
        "network", tuple(f"server {s}" for s in range(count)), between, between_latency, all_reduce=all_reduce
    )
    cluster = Cluster(devices, switches=(*inside, *((between_all,) if count > 1 else ())))
    check(cluster)
    return cluster


def dapple_a(between: float = 25 * GBIT, all_reduce: float | None = None) -> Cluster:
    """DAPPLE's configuration A (section VI): servers of 8; the paper gives 130 GB/s for NVLink within one."""
    return servers(2, 8, V100, 130e9, between, NVLINK_LATENCY, ETHERNET_LATENCY, all_reduce)


def dapple_b(between: float = 25 * GBIT, all_reduce: float | None = None) -> Cluster:
    """DAPPLE's configuration B: a GPU per server, 25 Gb/s Ethernet."""
    return servers(16, 1, V100, 1.0, between, between_latency=ETHERNET_LATENCY, all_reduce=all_reduce)


def dapple_c(between: float = 10 * GBIT, all_reduce: float | None = None) -> Cluster:
    """DAPPLE's configuration C: a GPU per server, 10 Gb/s Ethernet."""
    return servers(16, 1, V100, 1.0, between, between_latency=ETHERNET_LATENCY, all_reduce=all_reduce)


def p100s(nodes: int = 4, between: float = 100 * GBIT, within: float = 20e9) -> Cluster:
    """FlexFlow's P100 cluster: 4 nodes of 4 P100 with NVLink. A P100 has four NVLinks of 20 GB/s each way, one or two
    of which go to each neighbour; EDR InfiniBand is 100 Gb/s (the paper writes GB/s)."""
    return servers(nodes, 4, P100, within, between, NVLINK_LATENCY, INFINIBAND_LATENCY)


def k80s(nodes: int = 16, between: float = 56 * GBIT, within: float = 12e9) -> Cluster:
    """FlexFlow's K80 cluster: 16 nodes of 4 GPUs. Each pair of neighbours has a PCIe switch, and a switch above
    joins the two pairs. Messages that leave a pair take the pair's port, those that leave a node its network card.
    PCIe 3 x16 carries 12 GB/s."""
    labels = [f"K80:{i}" for i in range(4 * nodes)]
    devices = tuple(replace(K80, label=label, server=f"node {i // 4}") for i, label in enumerate(labels))
    pairs = tuple(
        Switch(f"pair {p}", (labels[2 * p], labels[2 * p + 1]), within, PCIE_LATENCY, through=True)
        for p in range(2 * nodes)
    )
    boxes = tuple(
        Switch(f"node {n}", (f"pair {2 * n}", f"pair {2 * n + 1}"), within, PCIE_LATENCY, through=True)
        for n in range(nodes)
    )
    network = Switch("network", tuple(f"node {n}" for n in range(nodes)), between, INFINIBAND_LATENCY)
    cluster = Cluster(devices, switches=(*pairs, *boxes, *((network,) if nodes > 1 else ())))
    check(cluster)
    return cluster


def p40s(count: int = 8) -> Cluster:
    """torchgpipe's box: 8 Tesla P40 on PCIe 3 x16, 12 GB/s of it usable."""
    return servers(1, count, P40, 12e9, 1.0, PCIE_LATENCY)


def h100s(count: int = 8) -> Cluster:
    """A DGX H100: NVLink of the fourth generation through NVSwitch, 450 GB/s each way for each GPU."""
    return servers(1, count, H100, 450e9, 1.0, NVLINK_LATENCY)


PRESETS: dict[str, Callable[[], Cluster]] = {
    "A": dapple_a,
    "B": dapple_b,
    "C": dapple_c,
    "p100": p100s,
    "k80": k80s,
    "p40": p40s,
    "h100": h100s,
}


# Presets that take a number of nodes, and how many devices a node has.
NODES: dict[str, tuple[Callable[[int], Cluster], int]] = {"p100": (p100s, 4), "k80": (k80s, 4)}


def preset(name: str) -> Cluster:
    """The preset of this name, optionally with a number of devices: "k80:8" is two of its nodes, "A:3" three of its
    devices. Raises ValueError for another name or number.

    >>> len(preset("k80").devices), len(preset("k80:6").devices), len(preset("p100:64").devices)
    (64, 6, 64)
    """
    kind, _, count = name.partition(":")
    if kind not in PRESETS:
        raise ValueError(f"there is no cluster {kind!r}; there are {', '.join(PRESETS)}")
    if not count:
        return PRESETS[kind]()
    if not (count.isdecimal() and int(count)):
        raise ValueError(f"{count!r} is no number of devices: write {kind}:8")
    make, each = NODES.get(kind, (None, 1))
    return fewer(make(-(-int(count) // each)) if make else PRESETS[kind](), int(count))
