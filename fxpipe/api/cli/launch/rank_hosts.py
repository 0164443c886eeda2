"""Which rank of a plan runs on which host and GPU.

Ranks have the plan's devices in the order of the stages. torchrun counts processes host by host, and of each host GPU
by GPU. A plan whose stages go back and forth between servers needs another order:

    rank  device  host  GPU  stage           host  processes, in the order of their GPUs
       0  V100:0     0    0  0                  0  rank 0, rank 2
       1  V100:8     1    0  0                  1  rank 1, rank 3
       2  V100:1     0    1  1
       3  V100:9     1    1  1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxpipe.errors import PlanError
from fxpipe.pipe.results.planned import Planned


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs.

    - `device`: its label in the cluster of the plan.
    - `host`: the number of its server, from 0, in the order of their first ranks.
    - `gpu`: which device of its server it is, from 0.
    - `stages`: those that it has.
    """

    rank: int
    device: str
    host: int
    gpu: int
    stages: tuple[int, ...]


Hosts = tuple[tuple[RankPlace, ...], ...]  # of each host its ranks, in the order of its GPUs


def rank_hosts(planned: Planned) -> Hosts:
    """The hosts with their ranks. Raises PlanError if the plan cannot run with a rank for each device."""
    cluster, stages = planned.cluster, planned.layers.stages
    used = list(dict.fromkeys(device for stage in stages for device in stage.devices))
    _check([cluster.labels[device] for device in used], planned)
    servers = list(dict.fromkeys(cluster.devices[device].server for device in used))
    hosts: list[list[RankPlace]] = [[] for _ in servers]
    for rank, device in enumerate(used):
        server = cluster.devices[device].server
        before = sum(other.server == server for other in cluster.devices[:device])
        own = tuple(s for s, stage in enumerate(stages) if device in stage.devices)
        host = servers.index(server)
        hosts[host].append(RankPlace(rank, cluster.labels[device], host, before, own))
    return tuple(tuple(sorted(host, key=lambda place: place.gpu)) for host in hosts)


def on_cpu(hosts: Hosts) -> bool:
    return _kind(hosts[0][0].device) == "cpu"


def in_order(hosts: Hosts) -> bool:
    """Whether torchrun gives the processes the ranks of the plan by itself. Of several hosts it decides the order."""
    return len(hosts) == 1 and [place.rank for place in hosts[0]] == list(range(len(hosts[0])))


def first_gpus(hosts: Hosts) -> bool:
    """Whether each host uses its first GPUs, without a gap."""
    return all([place.gpu for place in host] == list(range(len(host))) for host in hosts)


def table(hosts: Hosts) -> list[str]:
    """A row for each rank: its device, host, GPU and stages."""
    places = sorted((place for host in hosts for place in host), key=lambda place: place.rank)
    width = max(len(place.device) for place in places)
    rows = [f"rank  {'device':{max(width, 6)}}  host  {'CPU' if on_cpu(hosts) else 'GPU'}  stage"]
    for place in places:
        stages = ", ".join(map(str, place.stages))
        rows.append(f"{place.rank:4}  {place.device:{max(width, 6)}}  {place.host:4}  {place.gpu:3}  {stages}")
    return rows


def _check(labels: list[str], planned: Planned) -> None:
    kinds = sorted({_kind(label) for label in labels})
    if len(labels) == 1:
        raise PlanError(
            f"the plan has one device, {labels[0]}, and --launch is for a rank on each of several: run it in one "
            "process, as fxpipe.compile(model, plan='plan.json', devices=1)"
        )
    if len(kinds) > 1:
        raise PlanError(
            f"the plan is for {', '.join(labels)}, and ranks run on CPUs alone or on GPUs alone: plan for a cluster of "
            "one of them"
        )
    if not {"cpu", "cuda"} & set(kinds):
        raise PlanError(f"the plan is for {', '.join(labels)}, and --launch writes scripts for CPUs and for CUDA alone")
    if planned.layers.optimizer_sharding == "zero3" and planned.layers.shards_optimizer and kinds != ["cpu"]:
        raise PlanError(
            "the plan shards parameters over replicas (ZeRO-3), which runs over ranks on CPUs so far: plan with "
            "--optimizer-sharding zero1"
        )


def _kind(label: str) -> str:
    """The kind of device that a rank needs for the device of a cluster: labels such as V100:3 are those of GPUs."""
    try:
        return torch.device(label).type
    except RuntimeError:
        return "cuda"
