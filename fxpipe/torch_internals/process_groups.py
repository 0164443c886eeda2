"""Process groups that only their own ranks make, in the backend of another group.

torch.distributed.new_group gives a group the number of those made before as its name, so all ranks of it must have made
equally many; here the caller gives the name. A group without a place in torch.distributed's tables is a *backend*: its
calls are methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .capability import Capability

C10D = "torch.distributed.distributed_c10d"

STORE = Capability(
    what="the store of the process group",
    names=(f"{C10D}._get_default_store",),
    since="1.7",
    without="a pipe over ranks is refused",
)
NAMED_GROUPS = Capability(
    what="process groups whose name the caller gives",
    names=(f"{C10D}._new_process_group_helper", f"{C10D}._world.pg_group_ranks"),
    since="2.0",
    without="replica_group is refused",
)
OTHER_BACKENDS = Capability(
    what="what makes groups of a backend that somebody has registered",
    names=(f"{C10D}.Backend._plugins",),
    since="1.8",
    without="gloo carries all messages between CPUs, and backends that torch does not have itself are refused",
)
SHARED_THREAD = Capability(
    what="gloo's threads and network devices",
    names=(f"{C10D}.ProcessGroupGloo._Options",),
    since="1.8",
    without="each of a rank's groups of gloo has threads of its own",
)
BATCHES = Capability(
    what="one entry in a queue for several sends and receives",
    names=(f"{C10D}.ProcessGroup._start_coalescing", f"{C10D}.ProcessGroup._end_coalescing"),
    since="2.0",
    without="accelerators over ranks are refused",
)
FLAT_COLLECTIVES = Capability(
    what="all-gather and reduce-scatter of one tensor each",
    names=(
        f"{C10D}.ProcessGroup.all_gather_single or {C10D}.ProcessGroup._allgather_base",
        f"{C10D}.ProcessGroup.reduce_scatter_single or {C10D}.ProcessGroup._reduce_scatter_base",
    ),
    since="1.8",
    without="they are given as lists of tensors",
)


def default_store() -> Any:
    """The store of torch.distributed's own group. Raises FxpipeError."""
    STORE.need("a pipe over ranks")
    c10d: Any = dist.distributed_c10d
    return c10d._get_default_store()


def named_group(ranks: Sequence[int], backend: str, store: Any, name: str, limit: timedelta) -> Any:
    """The group of these ranks of the world, in this order, known to torch.distributed by this name. Raises
    RuntimeError if one of them does not come, FxpipeError."""
    NAMED_GROUPS.need("replica_group")
    c10d: Any = dist.distributed_c10d
    place = ranks.index(dist.get_rank())
    made, _ = c10d._new_process_group_helper(len(ranks), place, [*ranks], backend, store, name, timeout=limit)
    c10d._world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(ranks)}
    return made


def is_registered(backend: str) -> bool:
    """Whether somebody has registered this backend; torch registers its own too, from 2.14 on."""
    c10d: Any = dist.distributed_c10d
    return OTHER_BACKENDS.there and _own(backend) is None and backend.upper() in c10d.Backend._plugins


def backend_group(backend: str, store: Any, rank: int, size: int, limit: timedelta) -> Any:
    """A group in this backend. Raises FxpipeError for one that is not there."""
    if (own := _own(backend)) is not None:
        return own(store, rank, size, limit)
    OTHER_BACKENDS.need(f"a process group of {backend}")
    c10d: Any = dist.distributed_c10d
    plugin = c10d.Backend._plugins[backend.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, limit)
    options = c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, limit
    options.global_ranks_in_group = [*range(size)]
    return plugin.creator_fn(options, None)


def _own(backend: str) -> Any:
    """torch's own class for groups of this backend; None if it has none."""
    name = "Gloo" if backend == "gloo" else backend.upper()
    return getattr(dist.distributed_c10d, f"ProcessGroup{name}", None)


def gloo_pair(stores: tuple[Any, Any], rank: int, size: int, limit: timedelta) -> tuple[Any, Any]:
    """Two groups of gloo, whose connections one thread reads."""
    c10d: Any = dist.distributed_c10d
    one = c10d.ProcessGroupGloo(stores[0], rank, size, limit)
    if not SHARED_THREAD.there:
        return one, c10d.ProcessGroupGloo(stores[1], rank, size, limit)
    options = c10d.ProcessGroupGloo._Options()
    options._devices, options._threads, options._timeout = one.options._devices, one.options._threads, limit
    return one, c10d.ProcessGroupGloo(stores[1], rank, size, options)


@contextmanager
def batch(group: Any) -> Iterator[list[Any]]:
    """A context whose calls of the group are one entry of its queue, and have one work, which is then in the list."""
    BATCHES.need("a pipe over accelerators of several ranks")
    works: list[Any] = []
    group._start_coalescing()
    try:
        yield works
    finally:
        works.append(group._end_coalescing())


def all_gather(group: Any, found: Tensor, part: Tensor, limit: timedelta) -> Any:
    """Begin to put the flat parts of all ranks one behind the other into `found`; returns the work."""
    c10d: Any = dist.distributed_c10d
    options = c10d.AllgatherOptions()
    options.timeout = limit
    one = _either(group, "all_gather_single", "_allgather_base")
    if one is None:
        return group.allgather([[*found.chunk(group.size())]], [part], options)
    return one(found, part, options)


def reduce_scatter(group: Any, found: Tensor, parts: Tensor, limit: timedelta) -> Any:
    """Begin to put the sum of what all ranks give for this one, in their flat `parts`, into `found`; returns the
    work."""
    options: Any = dist.ReduceScatterOptions()
    options.reduceOp, options.timeout = dist.ReduceOp(dist.ReduceOp.SUM), limit
    one = _either(group, "reduce_scatter_single", "_reduce_scatter_base")
    if one is None:
        return group.reduce_scatter([found], [[*parts.chunk(group.size())]], options)
    return one(found, parts, options)


def _either(group: Any, *names: str) -> Any:
    """The method by its public name, or that before torch 2.14; None if there is neither."""
    named = (getattr(group, name, None) for name in names)
    return next((one for one in named if one is not None), None) if FLAT_COLLECTIVES.there else None
