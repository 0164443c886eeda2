"""Kinds of devices: devices of one kind take equally long for everything. Memory and place may differ."""

from __future__ import annotations

from .cluster import Cluster, Device


def alike(a: Device, b: Device) -> bool:
    """Whether two devices are of one kind."""
    return a.speeds == b.speeds


def other_kinds(cluster: Cluster, known: Device) -> dict[str, Device]:
    """A device of each kind in the cluster but that of `known`, by the name of the kind: what labels have before the
    colon, or a whole label where that stands for devices of several kinds.

    >>> from dataclasses import replace
    >>> v100, k80 = Device("V100:0", 1, 15e12, 9e11), Device("K80:0", 1, 4e12, 2e11)
    >>> list(other_kinds(Cluster((v100, k80, replace(k80, label="K80:1"))), v100))
    ['K80']
    """
    named: dict[str, list[Device]] = {}
    for device in cluster.devices:
        named.setdefault(device.label.rpartition(":")[0], []).append(device)
    found: dict[str, Device] = {}
    for name, devices in named.items():
        one = bool(name) and all(alike(devices[0], device) for device in devices)
        for device in devices:
            if not alike(device, known):
                found.setdefault(name if one else device.label, device)
    return found
