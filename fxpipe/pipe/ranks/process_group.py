"""The processes that a pipe runs in: the ranks of torch.distributed, or only this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fxpipe.engines.ranks.failure_attribution import Lost
from fxpipe.engines.ranks.rank_group import World
from fxpipe.engines.ranks.rendezvous import ADDRESS, fresh_store, store_may_be_stale
from fxpipe.engines.transports.collective_groups import CollectiveGroups
from fxpipe.engines.transports.communicators import Communicators, backends, each_way
from fxpipe.engines.transports.same_machine import SPIN, neighbours
from fxpipe.engines.transports.tcp_peer import connect
from fxpipe.errors import PlanError, RankError, warn
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.runtime.interrupts import Interrupts, ignore
from fxpipe.torch_internals.process_groups import default_store, is_registered, named_group

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def find_world(
    devices: int | str | torch.device | Sequence[str | torch.device] | Cluster | None,
    group: Any = None,
    timeout: float = 300.0,
) -> World | None:
    """The ranks that are the devices of a pipe; None if the whole pipe runs in this process. `timeout` in seconds.
    Raises PlanError if the number of ranks is not that of the devices, or there is no valid group."""
    if not timeout > 0:
        raise PlanError(f"timeout is {timeout}: write a number of seconds, such as 60")
    if group is None and (isinstance(devices, Sequence) or not in_world(timeout)):
        return None
    if not dist.is_available() or not dist.is_initialized():
        raise PlanError("group is given, and no process group is initialized: call init_process_group, or use torchrun")
    group = dist.group.WORLD if group is None else process_group(group)
    size = dist.get_world_size(group)
    if dist.get_rank(group) < 0:
        raise PlanError(f"rank {dist.get_rank()} is not in the group that is to run the pipe")
    if dist.get_rank() == 0 and store_may_be_stale():
        warn(
            "if torchrun starts this script again, as --max-restarts allows, init_process_group may fail or hang: the "
            "store of torchrun still has the addresses of ranks that are gone. Write "
            f"init_process_group(..., init_method={ADDRESS!r}), or leave it out: fxpipe.compile calls it"
        )
    wanted = len(devices.labels) if isinstance(devices, Cluster) else devices
    if wanted is not None and wanted != size:
        raise PlanError(
            f"devices is {wanted if not isinstance(wanted, Sequence) else list(wanted)}, and there are {size} ranks: "
            f"write devices={size}, start as many ranks as devices, or name the devices of this process in a list"
        )
    return join_pipe(group, own_device(group), timeout)


def join_pipe(group: Any, device: torch.device, timeout: float) -> World:
    """The world of the ranks of `group`, for a new pipe, which all of them make. Raises RankError if one does not."""
    while True:
        made = join(group, device, timeout)
        if made.lost is not None:
            raise RankError(f"{made.lost}; start all ranks again")
        try:
            number_pipe(made)
            return made
        except Lost as lost:
            if not lost.alive:
                raise RankError(str(lost)) from None
        # A rank was still in a call of a pipe that another rank has closed: all ranks try again.


def number_pipe(world: World) -> None:
    """Give a new pipe the same number on all ranks, which make this call together. Raises Lost, also if another rank is
    still in a pipe that this one has left."""
    with world.interrupts:
        world.all_gather_object(None)
        world.open.make()


def in_world(timeout: float) -> bool:
    """Whether there are several ranks. Initializes the process group if torchrun started this process."""
    if not dist.is_available():
        return False
    if not dist.is_initialized():
        if not all(name in os.environ for name in TORCHRUN) or int(os.environ["WORLD_SIZE"]) < 2:
            return False
        gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) > 0
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, init_method=ADDRESS, timeout=timedelta(seconds=timeout))
    return dist.get_world_size() > 1


def process_group(group: Any) -> Any:
    """The group itself, or that of a mesh. Raises PlanError if the mesh has several dimensions."""
    if not isinstance(group, dist.device_mesh.DeviceMesh):
        return group
    if group.ndim != 1:
        raise PlanError(
            f"group is a mesh of {group.ndim} dimensions: name the one that the pipe is to run along, as in mesh['pp']"
        )
    return group.get_group()


def replica_process_group(world: World, replicas: Sequence[int]) -> Any:
    """The process group of these ranks of the world, made by the first call, which all of them make. Raises RankError
    if one does not.

    Made directly, as the connections in `join` are, but known to torch.distributed, for what others do with it. Its
    name is of this world and these ranks, so it does not matter which groups they have made before, in which order."""
    key: tuple[World | int, ...] = (world, *replicas)
    if key not in _replica_groups:
        everywhere = dist.get_process_group_ranks(world.group)
        ranks = sorted(everywhere[rank] for rank in replicas)
        backend = dist.get_backend_config(world.group)
        name = f"fxpipe/replicas/{ranks}/{everywhere}/{world.device.type}/{world.timeout}/{backend}"
        try:
            _replica_groups[key] = named_group(ranks, backend, world.store, name, world.limit)
        except RuntimeError as error:
            names = ", ".join(map(str, replicas))
            raise RankError(f"not all of the ranks {names} have asked for their replica_group: {error}") from None
    return _replica_groups[key]


_replica_groups: dict[tuple[World | int, ...], Any] = {}


def own_device(group: Any) -> torch.device:
    """The device of this rank: an accelerator if the group has a backend for one, else the CPU."""
    kind = next((kind for kind, backend in backends(group).items() if kind != "cpu" and backend != "gloo"), "cpu")
    if kind == "cpu" or not torch.get_device_module(kind).is_available():
        return torch.device("cpu")
    module = torch.get_device_module(kind)
    index = int(os.environ.get("LOCAL_RANK", dist.get_rank() % module.device_count()))
    module.set_device(index)
    return torch.device(kind, index)


# To join a world ------------------------------------------------------------------------------------------------------

_worlds: dict[Any, World] = {}


def join(group: Any, device: torch.device, timeout: float) -> World:
    """The world of the ranks of `group`. It has connections of its own, which all pipes on these ranks share. Raises
    RankError if a rank is lost meanwhile."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    backend = backends(group).get(device.type, "gloo")
    key = (*ranks, device, timeout, backend, id(dist.group.WORLD))
    known = _worlds.get(key)
    if known is not None and (known.lost is None or not known.lost.alive):
        return known
    # Makes backends directly: torch.distributed.new_group requires all ranks of the whole world to take part, or else
    # (torch 2.13) that all ranks are in equally many groups, whose number gives the new group its name.
    store: Any = PrefixStore(f"fxpipe/{backend}/{'-'.join(map(str, ranks))}/{timeout}", default_store())
    store = fresh_store(store, rank, len(ranks), timeout)  # `store` may have addresses and losses of an earlier start
    with Interrupts(ignore):  # all other ranks connect now, and would wait for this one if Ctrl-C ended it
        _worlds[key] = connected(group, device, timeout, backend, store)
    return _worlds[key]


def connected(group: Any, device: torch.device, timeout: float, backend: str, store: Any) -> World:
    """The new world of ranks that have all come. Raises RankError if a rank is lost meanwhile."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    limit = timedelta(seconds=timeout)
    control = each_way(store, rank, len(ranks), limit)
    try:
        tcp_peers = connect(store, rank, len(ranks), limit, SPIN)
    except (OSError, RuntimeError) as error:
        raise RankError(f"rank {rank} cannot connect to the other ranks: {error}") from error
    labels = tuple(f"{device.type}:{rank}" for rank in range(len(ranks)))
    queued = device.type != "cpu" or is_registered(backend)
    groups = CollectiveGroups(backend if queued else "gloo", store, rank, device, limit)
    made = World(group, rank, labels, device, control, tcp_peers, timeout, store, groups)
    try:
        made.local_peers = neighbours(rank, made.all_gather_object)
        if queued:
            made.communicators = Communicators(backend, store, rank, len(ranks), device, limit)
            for call in made.communicators.touch():
                made.settle(call)
    except Lost as lost:
        raise RankError(str(lost)) from None
    return made
