"""What there is to run on: devices, the servers they sit in, and the links between them. A cluster is data; it is
written to JSON, edited and compared, and nothing here asks the machine.

    device  server  memory  compute     memory bandwidth
    cuda:0  local   16 GB   15 Tflop/s  900 GB/s
    cuda:1  local   16 GB   15 Tflop/s  900 GB/s

    link           bandwidth  latency
    local - local  12 GB/s    10 us

A link joins two devices or two servers, both ways; `link` finds the narrowest one that fits a pair. Sharing of a link
and deeper hierarchies are further fields of `Link`, when somebody plans with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import combinations

from tabulate import tabulate

from .units import show_bytes, show_seconds


@dataclass(frozen=True)
class Device:
    """A device by its label ("cuda:0"; "cpu:1" is the second CPU worker): bytes of memory, floating-point operations
    per second, bytes of memory read or written per second."""

    label: str
    memory: int
    flops: float
    bandwidth: float
    server: str = "local"


@dataclass(frozen=True)
class Link:
    """A way between two devices, or any device of one server and any of another (or of the same): bytes per second
    each way, and the seconds before the first byte arrives."""

    ends: tuple[str, str]
    bandwidth: float
    latency: float


# Assumptions for `Cluster.of`, where nobody has said better: a data-center GPU on PCIe 3, one core of a server.
ASSUMED_GPU = Device("cuda", memory=16 * 10**9, flops=15e12, bandwidth=900e9)
ASSUMED_CPU_WORKER = Device("cpu", memory=64 * 10**9, flops=50e9, bandwidth=10e9)
ASSUMED_LINK = Link(("local", "local"), bandwidth=12e9, latency=10e-6)


@dataclass(frozen=True)
class Cluster:
    """Devices in the order that pipelines use them, and the links between. Check with `check`, print with `str`."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...]

    def __str__(self) -> str:
        return show(self)

    @classmethod
    def of(
        cls,
        labels: Iterable[str],
        gpu: Device = ASSUMED_GPU,
        cpu: Device = ASSUMED_CPU_WORKER,
        via: Link = ASSUMED_LINK,
    ) -> Cluster:
        """Devices of this machine with assumed figures; a label that comes twice is one device.

        >>> [device.label for device in Cluster.of(["cpu:0", "cpu:1", "cpu:0"]).devices]
        ['cpu:0', 'cpu:1']
        """
        kinds = ((label, cpu if label.split(":")[0] == "cpu" else gpu) for label in dict.fromkeys(labels))
        server = via.ends[0]
        cluster = cls(tuple(replace(kind, label=label, server=server) for label, kind in kinds), (via,))
        check(cluster)
        return cluster

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(device.label for device in self.devices)

    def device(self, label: str) -> Device:
        """The device of this label; KeyError where there is none."""
        for device in self.devices:
            if device.label == label:
                return device
        raise KeyError(f"the cluster has no device {label!r}; it has {', '.join(self.labels)}")


def link(cluster: Cluster, a: str, b: str) -> Link:
    """The link that values between devices `a` and `b` take: their own, or else that of their servers."""
    servers = {cluster.device(a).server, cluster.device(b).server}
    found = [e for e in cluster.links if set(e.ends) == {a, b}] or [e for e in cluster.links if set(e.ends) == servers]
    if not found:
        raise KeyError(f"no link joins {a} and {b}, nor their servers {' and '.join(sorted(servers))}")
    return min(found, key=lambda e: e.bandwidth)


def check(cluster: Cluster) -> None:
    """Raise ValueError where the cluster cannot be planned for: no devices, a label twice, figures that are not
    positive, a link to nowhere, two devices that nothing joins."""
    if not cluster.devices:
        raise ValueError("the cluster has no devices")
    known = {device.server for device in cluster.devices}
    for device in cluster.devices:
        if device.label in known:
            raise ValueError(f"the name {device.label!r} stands for two devices or servers")
        known.add(device.label)
        if min(device.memory, device.flops, device.bandwidth) <= 0:
            raise ValueError(f"device {device.label} has a figure that is not positive: {device}")
    for one in cluster.links:
        if not known.issuperset(one.ends):
            raise ValueError(f"the link {' - '.join(one.ends)} joins something that is not in the cluster")
        if one.bandwidth <= 0 or one.latency < 0:
            raise ValueError(f"the link {' - '.join(one.ends)} has a figure that is not positive: {one}")
    for a, b in combinations(cluster.labels, 2):
        try:
            link(cluster, a, b)
        except KeyError as error:
            raise ValueError(error.args[0]) from None


def show(cluster: Cluster) -> str:
    """Two tables, devices and links."""
    devices = [
        (d.label, d.server, show_bytes(d.memory), f"{d.flops / 1e12:.3g} Tflop/s", f"{show_bytes(d.bandwidth)}/s")
        for d in cluster.devices
    ]
    links = [(" - ".join(e.ends), f"{show_bytes(e.bandwidth)}/s", show_seconds(e.latency)) for e in cluster.links]
    return "\n\n".join(
        (
            tabulate(devices, ("device", "server", "memory", "compute", "memory bandwidth"), tablefmt="plain"),
            tabulate(links, ("link", "bandwidth", "latency"), tablefmt="plain"),
        )
    )


def dump(cluster: Cluster) -> str:
    """The cluster as JSON text; `load` reads it back."""
    return json.dumps(asdict(cluster), indent=1) + "\n"


def load(text: str) -> Cluster:
    """The cluster that `dump` wrote. Raises ValueError for text that is not one."""
    try:
        data = json.loads(text)
        devices = tuple(Device(**device) for device in data["devices"])
        cluster = Cluster(devices, tuple(Link(**{**e, "ends": tuple(e["ends"])}) for e in data["links"]))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a cluster: {error!r}") from None
    check(cluster)
    return cluster
