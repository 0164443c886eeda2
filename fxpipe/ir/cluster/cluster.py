"""What there is to run on: devices, the servers they sit in, and the links between them. A cluster is data; it is
written to JSON, edited and compared, and nothing here asks the machine.

    device  server  memory  compute     memory bandwidth
    cuda:0  local   16 GB   15 Tflop/s  900 GB/s
    cuda:1  local   16 GB   15 Tflop/s  900 GB/s

    link           bandwidth  latency
    local - local  12 GB/s    10 us

A link joins two devices or two servers, both ways; `link` finds the narrowest one that fits a pair. A switch joins any
number of devices, servers or other switches, each by a port that its traffic shares: NVLink within a server, the one
network card of each server, the uplink of a rack. `network.py` says how long a set of messages takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import ClassVar

from tabulate import tabulate

from fxpipe.ir import dataclass_json
from fxpipe.ir.dataclass_json import read, write
from fxpipe.ir.units import show_bytes, show_seconds

from .device_labels import Label
from .matrix_speed import MatrixSpeed, check_speeds


@dataclass(frozen=True)
class Device:
    """One device.

    - `label`: its name, such as "cuda:0"; "cpu:1" is the second CPU worker.
    - `memory`: in bytes.
    - `flops`: peak floating-point operations per second of all but the matrix products in `matrices`.
    - `bandwidth`: peak bytes of memory read or written per second.
    - `server`: the name of the server that the device is in.
    - `matrices`: how fast it multiplies matrices: a `MatrixSpeed` for each element type.
    - `memory_efficiency`: the share of `bandwidth` that ops reach.
    - `source`: where the figures are from.
    """

    label: Label
    memory: int
    flops: float
    bandwidth: float
    server: str = "local"
    matrices: tuple[MatrixSpeed, ...] = ()
    memory_efficiency: float = 1.0
    source: str = ""

    @cached_property
    def speeds(self) -> tuple[float, float, tuple[MatrixSpeed, ...]]:
        """All figures that times depend on."""
        return self.flops, self.bandwidth * self.memory_efficiency, self.matrices


@dataclass(frozen=True)
class Link:
    """A link between two devices, or between any device of one server and any of another (or of the same).

    - `ends`: two device labels or two server names.
    - `bandwidth`: bytes per second, each way.
    - `latency`: seconds before the first byte arrives.
    """

    ends: tuple[str, str]
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Switch:
    """A switch joins its members, each by one port. All that a member sends to the others shares its port. A switch may
    have the name of a server, and then joins the devices in that server.

    - `members`: devices, servers or other switches.
    - `bandwidth`: bytes per second that a member sends through its port. At the same time it may receive as many.
    - `latency`: seconds before the first byte arrives.
    - `into`: bytes per second that a member receives through its port; None: `bandwidth`.
    - `through`: whether a message between a member and a device that is not behind this switch uses the member's port,
      too. True for PCIe and Ethernet switches, which all traffic crosses on its way to a higher switch; False for
      NVLink, where such a message leaves by a network card.
    - `all_reduce`: bytes per second of an all-reduce in a ring of members; None: the least rate of their ports.
    - `card`: bytes per second of one network card, if each device of a server has its own; None: the server has one for
      all. `bandwidth` is then that of all cards of a member together.
    """

    name: str
    members: tuple[str, ...]
    bandwidth: float
    latency: float
    into: float | None = None
    through: bool = False
    all_reduce: float | None = None
    card: float | None = None

    @property
    def receiving(self) -> float:
        return self.bandwidth if self.into is None else self.into


# Defaults of `Cluster.of`: a data-center GPU on PCIe 3, one core of a server.
ASSUMED_GPU = Device("cuda", memory=16 * 10**9, flops=15e12, bandwidth=900e9)
ASSUMED_CPU_WORKER = Device("cpu", memory=64 * 10**9, flops=50e9, bandwidth=10e9)
ASSUMED_LINK = Link(("local", "local"), bandwidth=12e9, latency=10e-6)


@dataclass(frozen=True)
class Cluster:
    """Devices in the order in which pipelines use them, with the links and switches between them. Print with `str`;
    `fxpipe.ir.cluster.cluster` has `check`, which raises ValueError for impossible figures, `dump` and `load`."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    switches: tuple[Switch, ...] = ()

    detect: ClassVar[
        Callable[..., Cluster]
    ]  # the cluster of this machine: `fxpipe.pipe.build.local_cluster`, set from there, as it needs torch

    def __str__(self) -> str:
        return show(self)

    __repr__ = __str__  # what a notebook's cell or the interpreter shows

    @classmethod
    def of(
        cls,
        labels: Iterable[str],
        gpu: Device = ASSUMED_GPU,
        cpu: Device = ASSUMED_CPU_WORKER,
        via: Link = ASSUMED_LINK,
    ) -> Cluster:
        """Devices with these labels, such as "cuda:0" or "cpu:1"; one that comes twice is one device. Labels that begin
        with "cpu" have the figures of `cpu`, all others those of `gpu`; `via` is the link between any two.

        >>> [device.label for device in Cluster.of(["cpu:0", "cpu:1", "cpu:0"]).devices]
        ['cpu:0', 'cpu:1']
        """
        kinds = ((label, cpu if label.split(":")[0] == "cpu" else gpu) for label in dict.fromkeys(labels))
        server = via.ends[0]
        cluster = cls(tuple(replace(kind, label=label, server=server) for label, kind in kinds), (via,))
        check(cluster)
        return cluster

    @cached_property
    def labels(self) -> tuple[str, ...]:
        return tuple(device.label for device in self.devices)

    def device(self, label: str) -> Device:
        """The device of this label; KeyError where there is none."""
        if label not in self._by_label:
            raise KeyError(f"the cluster has no device {label!r}; it has {', '.join(self.labels)}")
        return self._by_label[label]

    @cached_property
    def _by_label(self) -> dict[str, Device]:
        return {device.label: device for device in self.devices}

    @cached_property
    def _switch_of(self) -> dict[str, Switch]:
        return {member: switch for switch in self.switches for member in switch.members}

    @cached_property
    def _sound(self) -> bool:
        """True, remembered; raises what `check` raises."""
        _check(self)
        return True

    @cached_property
    def _between(self) -> dict[tuple[str, str], Link]:
        return {}

    @cached_property
    def ports(self) -> dict[str, tuple[tuple[Switch, str], ...]]:
        """For each device the ports that its traffic goes through, lowest first: (switch, the member whose port)."""
        return {device.label: tuple(_ports(device, self._switch_of)) for device in self.devices}


def _ports(device: Device, switch_of: dict[str, Switch]) -> Iterator[tuple[Switch, str]]:
    at, seen = device.label, {device.label}
    while at in switch_of or at == device.label:
        if at in switch_of:
            yield switch_of[at], at
        at = switch_of[at].name if at in switch_of else device.server
        if at in seen:  # a switch below itself; `check` says so
            return
        seen.add(at)


def meeting(cluster: Cluster, a: str, b: str) -> Switch | None:
    """The lowest switch that joins two devices, None if no switch does."""
    theirs = {switch.name for switch, _ in cluster.ports[b]}
    return next((switch for switch, _ in cluster.ports[a] if switch.name in theirs), None)


def link(cluster: Cluster, a: str, b: str) -> Link:
    """The link between devices `a` and `b`: their own, or else that of their servers, or else the way through the
    lowest switch that joins them; remembered. Raises KeyError if nothing joins them."""
    found = cluster._between.get((a, b))
    if found is None:
        found = cluster._between[a, b] = _link(cluster, a, b)
    return found


def _link(cluster: Cluster, a: str, b: str) -> Link:
    servers = {cluster.device(a).server, cluster.device(b).server}
    found = [e for e in cluster.links if set(e.ends) == {a, b}] or [e for e in cluster.links if set(e.ends) == servers]
    if found:
        return min(found, key=lambda e: e.bandwidth)
    switch = meeting(cluster, a, b)
    if switch is None:
        raise KeyError(f"no link joins {a} and {b}, nor their servers {' and '.join(sorted(servers))}")
    below = [s for end in (a, b) for s in _below(cluster, end, switch)]
    return Link((a, b), min(_narrowest(s) for s in (switch, *below)), switch.latency)


def _narrowest(switch: Switch) -> float:
    """The bytes per second that two devices alone reach through the ports of a switch."""
    rates = (switch.bandwidth, switch.receiving)
    return min(rates if switch.card is None else (*rates, switch.card))


def _below(cluster: Cluster, label: str, top: Switch) -> list[Switch]:
    """The switches on the way from a device up to `top` whose ports carry what goes through."""
    way = [switch for switch, _ in cluster.ports[label]]
    return [switch for switch in way[: way.index(top)] if switch.through]


def check(cluster: Cluster) -> None:
    """Raise ValueError where the cluster cannot be planned for: no devices, a label that is not one or comes twice,
    figures that are not positive, a link to nowhere, two devices that nothing joins. A cluster without a fault is
    looked at once."""
    _ = cluster._sound


def _check(cluster: Cluster) -> None:
    dataclass_json.check(cluster)
    if not cluster.devices:
        raise ValueError("the cluster has no devices")
    known = {device.server for device in cluster.devices}
    for device in cluster.devices:
        if device.label in known:
            raise ValueError(f"the name {device.label!r} stands for two devices or servers")
        known.add(device.label)
        if min(device.memory, device.flops, device.bandwidth) <= 0:
            raise ValueError(f"device {device.label} has a figure that is not positive: {device}")
        if not 0 < device.memory_efficiency <= 1:
            share = device.memory_efficiency
            raise ValueError(f"device {device.label} reaches {share} of its bandwidth; write a share of at most 1")
        check_speeds(device.label, device.matrices)
    for one in cluster.links:
        if not known.issuperset(one.ends):
            raise ValueError(f"the link {' - '.join(one.ends)} joins something that is not in the cluster")
        if one.bandwidth <= 0 or one.latency < 0:
            raise ValueError(f"the link {' - '.join(one.ends)} has a figure that is not positive: {one}")
    _check_switches(cluster, known)
    for a, b in combinations(cluster.labels, 2) if cluster.links or not cluster.switches else _neighbours(cluster):
        try:
            link(cluster, a, b)
        except KeyError as error:
            raise ValueError(error.args[0]) from None


def _neighbours(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Switches form trees: if each device meets the first one, all meet each other."""
    return ((cluster.labels[0], other) for other in cluster.labels[1:])


def _check_switches(cluster: Cluster, known: set[str]) -> None:
    servers = {device.server for device in cluster.devices}
    names = {switch.name for switch in cluster.switches}
    behind: dict[str, str] = {}
    if len(names) < len(cluster.switches):
        raise ValueError("two switches have the same name")
    for switch in cluster.switches:
        rates = (
            switch.bandwidth,
            switch.receiving,
            switch.bandwidth if switch.all_reduce is None else switch.all_reduce,
            switch.bandwidth if switch.card is None else switch.card,
        )
        if not (min(rates) > 0 and switch.latency >= 0):
            raise ValueError(f"the switch {switch.name!r} has a figure that is not positive: {switch}")
        if switch.name in known - servers:
            raise ValueError(f"the name {switch.name!r} stands for a device and a switch")
        if not switch.members:
            raise ValueError(f"the switch {switch.name!r} joins nothing")
        for member in switch.members:
            if member not in known | names:
                raise ValueError(f"the switch {switch.name!r} joins {member!r}, which is not in the cluster")
            if behind.setdefault(member, switch.name) != switch.name:
                raise ValueError(f"{member!r} is behind two switches, {behind[member]!r} and {switch.name!r}")
    for start in behind:
        at = start
        for _ in behind:
            at = behind.get(at, "")
            if at == start:
                raise ValueError(f"the switch {start!r} is behind itself")
            if not at:
                break


def show(cluster: Cluster) -> str:
    """A table of devices, one of links and one of switches."""
    devices = [
        (d.label, d.server, show_bytes(d.memory), _compute(d), f"{show_bytes(d.bandwidth)}/s") for d in cluster.devices
    ]
    links = [(" - ".join(e.ends), f"{show_bytes(e.bandwidth)}/s", show_seconds(e.latency)) for e in cluster.links]
    switches = [
        (s.name, _members(s), f"{show_bytes(s.bandwidth)}/s", show_seconds(s.latency)) for s in cluster.switches
    ]
    tables = [tabulate(devices, ("device", "server", "memory", "compute", "memory bandwidth"), tablefmt="plain")]
    if links or not switches:
        tables.append(tabulate(links, ("link", "bandwidth", "latency"), tablefmt="plain"))
    if switches:
        tables.append(tabulate(switches, ("switch", "joins", "bandwidth", "latency"), tablefmt="plain"))
    return "\n\n".join(tables)


def _compute(device: Device) -> str:
    """Teraflop/s, of products by element type where they are known."""
    by_type = [f"{one.dtype} {one.peak / 1e12:.3g}" for one in device.matrices]
    return f"{', '.join(by_type) or format(device.flops / 1e12, '.3g')} Tflop/s"


def _members(switch: Switch) -> str:
    names = switch.members
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} .. {names[-1]} ({len(names)})"


def dump(cluster: Cluster) -> str:
    """The cluster as JSON text; `load` reads it back."""
    return write(cluster)


def load(text: str) -> Cluster:
    """The cluster that `dump` wrote. Raises ValueError for text that is not one."""
    cluster = read(Cluster, text)
    check(cluster)
    return cluster
