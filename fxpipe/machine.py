"""The machine at hand as a cluster: its real memory, and assumed speeds where nothing has measured them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from .codegen.load import worker_device
from .ir.cluster import ASSUMED_CPU_WORKER, Cluster


def local_cluster(labels: Sequence[str]) -> Cluster:
    """The devices with these labels. CPU workers share the machine's memory, so each may have all of it."""
    cpu = replace(ASSUMED_CPU_WORKER, memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    cluster = Cluster.of(labels, cpu=cpu)
    present = {torch.device("cuda", index) for index in range(torch.cuda.device_count())}
    devices = (
        replace(device, memory=torch.cuda.get_device_properties(device.label).total_memory)
        if worker_device(device.label) in present
        else device
        for device in cluster.devices
    )
    return replace(cluster, devices=tuple(devices))
