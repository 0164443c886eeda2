"""Clusters of published experiments, and nodes of current GPUs. Figures are nominal, each with its source. Programs
reach less, so devices have the share of their peak that products reach, and presets of several servers take the
effective bandwidth between servers as an argument.

    preset   devices                        within a server   between servers
    dapple_a 2 servers of 8 V100            NVLink            25 Gb/s Ethernet
    dapple_b 16 servers of 1 V100           -                 25 Gb/s Ethernet
    dapple_c 16 servers of 1 V100           -                 10 Gb/s Ethernet
    p100s    4 nodes of 4 P100              NVLink            100 Gb/s EDR InfiniBand
    k80s     16 nodes of 4 K80 (GPUs)       PCIe switches     56 Gb/s InfiniBand
    p40s     1 box of 8 P40                 PCIe              -
    a100s    nodes of 8 A100                NVLink            8 x 200 Gb/s InfiniBand
    h100s    nodes of 8 H100                NVLink            8 x 400 Gb/s InfiniBand
    b200s    nodes of 8 B200                NVLink            8 x 400 Gb/s InfiniBand
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fxpipe.errors import did_you_mean

from .cluster import Cluster, Device, Switch, check
from .matrix_speed import MatrixSpeed
from .what_if import fewer

GB = 10**9

OLD = 0.5  # assumed: the share of their peak that products of common sizes reach on GPUs before the A100
# The A100's share reproduces the first row of table 1 of Narayanan et al., "Efficient large-scale language model
# training on GPU clusters using Megatron-LM", 2021, see `benchmarks/megatron.py`. That of later GPUs is assumed to be
# the same.
A100_REACHES = 0.595
MEMORY_REACHES = 0.85  # assumed: what large copies reach


def _gpu(label: str, memory: int, bandwidth: float, reaches: float, copies: float, **teraflops: float) -> Device:
    """A GPU with NVIDIA's own figures: `teraflops` of products by element type, without sparsity."""
    speeds = tuple(MatrixSpeed(dtype, value * 1e12, reaches) for dtype, value in teraflops.items())
    source = f"data sheet of the {label}; products reach {reaches:.0%} and memory {copies:.0%} of it"
    return Device(label, memory * GB, teraflops["f32"] * 1e12, bandwidth, "local", speeds, copies, source)


# A K80 is a board of two GPUs: this is one of them. The A100 and H100 are the SXM modules of 80 GB, the B200 that of a
# DGX B200 at 1000 W.
V100 = _gpu("V100", 16, 900e9, OLD, 1.0, f32=15.7, f16=125)
P100 = _gpu("P100", 16, 732e9, OLD, 1.0, f32=10.6, f16=21.2)
K80 = _gpu("K80", 12, 240e9, OLD, 1.0, f32=4.37)
P40 = _gpu("P40", 24, 346e9, OLD, 1.0, f32=11.8)
A100 = _gpu("A100", 80, 2.039e12, A100_REACHES, MEMORY_REACHES, f64=19.5, f32=19.5, tf32=156, bf16=312, f16=312)
H100 = _gpu("H100", 80, 3.35e12, A100_REACHES, MEMORY_REACHES, f64=67, f32=67, tf32=494.7, bf16=989.4, f16=989.4,
            f8=1978.9)  # fmt: skip
B200 = _gpu("B200", 180, 8e12, A100_REACHES, MEMORY_REACHES, f64=40, f32=80, tf32=1100, bf16=2250, f16=2250, f8=4500)
KNOWN = (V100, P100, K80, P40, A100, H100, B200)

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
    card: float | None = None,
) -> Cluster:
    """`count` servers of `each` devices. Rates are in bytes per second:

    - `within`: of each device's port in its server.
    - `between`: of each server's network cards.
    - `all_reduce`: that a ring over the network cards reaches, if that is another rate.
    - `card`: of each device's own network card, if it has one.
    """
    names = [[f"{kind.label}:{s * each + i}" for i in range(each)] for s in range(count)]
    devices = tuple(replace(kind, label=name, server=f"server {s}") for s in range(count) for name in names[s])
    inside = tuple(Switch(f"server {s}", tuple(names[s]), within, within_latency) for s in range(count) if each > 1)
    between_all = Switch(
        "network",
        tuple(f"server {s}" for s in range(count)),
        between,
        between_latency,
        all_reduce=all_reduce,
        card=card,
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


def a100s(nodes: int = 1, card: float = 200 * GBIT) -> Cluster:
    """DGX A100: 8 GPUs, NVLink of the third generation through NVSwitch, 300 GB/s each way for each GPU, and for each
    GPU a network card of HDR InfiniBand."""
    return _dgx(nodes, A100, 300e9, card)


def h100s(nodes: int = 1, card: float = 400 * GBIT) -> Cluster:
    """DGX H100: 8 GPUs, NVLink of the fourth generation through NVSwitch, 450 GB/s each way for each GPU, and for each
    GPU a network card of NDR InfiniBand."""
    return _dgx(nodes, H100, 450e9, card)


def b200s(nodes: int = 1, card: float = 400 * GBIT) -> Cluster:
    """DGX B200: 8 GPUs, NVLink of the fifth generation through NVSwitch, 900 GB/s each way for each GPU, and for each
    GPU a network card of NDR InfiniBand."""
    return _dgx(nodes, B200, 900e9, card)


def _dgx(nodes: int, kind: Device, within: float, card: float) -> Cluster:
    return servers(nodes, 8, kind, within, 8 * card, NVLINK_LATENCY, INFINIBAND_LATENCY, card=card)


PRESETS: dict[str, Callable[[], Cluster]] = {
    "A": dapple_a,
    "B": dapple_b,
    "C": dapple_c,
    "p100": p100s,
    "k80": k80s,
    "p40": p40s,
    "a100": a100s,
    "h100": h100s,
    "b200": b200s,
}


# Presets that take a number of nodes, and how many devices a node has.
NODES: dict[str, tuple[Callable[[int], Cluster], int]] = {
    "p100": (p100s, 4),
    "k80": (k80s, 4),
    "a100": (a100s, 8),
    "h100": (h100s, 8),
    "b200": (b200s, 8),
}


def preset(name: str) -> Cluster:
    """The preset of this name, optionally with a number of devices: "k80:8" is two of its nodes, "h100:64" eight nodes,
    "A:3" three of its devices. Raises ValueError for another name or number.

    >>> len(preset("k80").devices), len(preset("k80:6").devices), len(preset("p100:64").devices)
    (64, 6, 64)
    """
    kind, _, count = name.partition(":")
    if kind not in PRESETS:
        raise ValueError(f"there is no cluster {kind!r}; there are {', '.join(PRESETS)}{did_you_mean(kind, PRESETS)}")
    if not count:
        return PRESETS[kind]()
    if not (count.isdecimal() and int(count)):
        raise ValueError(f"{count!r} is no number of devices: write {kind}:8")
    make, each = NODES.get(kind, (None, 1))
    return fewer(make(-(-int(count) // each)) if make else PRESETS[kind](), int(count))
