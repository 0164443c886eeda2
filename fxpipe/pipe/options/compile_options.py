"""The options of `fxpipe.compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxpipe.errors import PlanError, nearest
from fxpipe.ir.cluster import cluster as clusters
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.plan.plan_file import PlanFile
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.sample_lists import BatchDim
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.passes import Pass
from fxpipe.pipe.build.compiled.device_graphs import NAME, device_graphs
from fxpipe.runtime import accelerator
from fxpipe.runtime.accelerator import has_streams
from fxpipe.schedules.make_schedule import AUTO, SCHEDULES, WARM, Own, make, placement

if TYPE_CHECKING:
    from fxpipe.capture.tracing.rewriting.graph_view import Transform

DEVICE_MEMORY = "device"  # the `memory_limit` that is the memory of each device

Place = Callable[[Graph, Mapping[str, int]], Placed]  # what a strategy makes of a graph with these sizes


@dataclass(frozen=True)
class Options:
    """The arguments of `fxpipe.compile`, as given there except for these:

    - `devices`: one label for each stage, or for each device of a strategy.
    - `checkpoint`: also the mode of each stage.
    - `replicas`: the further devices of a stage, by the label of its first.
    - `cluster`: `devices` if that is a cluster, or the cluster that the plan was made for, if it runs on its devices.
    - `place`: the function of a strategy that assigns devices to ops.
    - `ranks`: whether each device is a process of torch.distributed: `cpu:1` or `cuda:1` is rank 1.
    """

    devices: tuple[str, ...]
    chunks: int
    schedule: Own = "gpipe"
    stages_per_device: int | str = AUTO
    warmup: str | tuple[int, ...] = AUTO
    checkpoint: str | frozenset[int] | tuple[str, ...] = AUTO
    offload: frozenset[int] = frozenset()
    cut: str | tuple[int, ...] | tuple[str, ...] = "time"
    profile: str | Profile = "estimate"
    cluster: Cluster | None = None
    plan: Plan | PlanFile | None = None
    batch_dim: BatchDim = 0
    dynamic: bool = True
    reduce: str | Mapping[str, str] = AUTO
    deferred_batch_norm: bool | None = None
    compile_stages: bool | str | Callable[..., Any] = False
    dump: Path | None = None
    backward: str = AUTO
    overlap_pairs: bool = False
    memory_limit: int | str | None = None
    replicas: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    place: Place | None = None
    ranks: bool = False
    transforms: tuple[Transform, ...] = ()
    passes: tuple[Pass, ...] = ()

    @property
    def saves_only(self) -> bool:
        """Whether stages recompute where their device then keeps less, as nothing else was said about it."""
        return self.checkpoint == AUTO and self.memory_limit is None and self.plan is None and self.place is None

    @property
    def known_reduce(self) -> str | Mapping[str, str] | None:
        """How outputs are combined, as far as the user says it."""
        return None if self.reduce == AUTO else self.reduce


def backend_of(asked: bool | str | Callable[..., Any]) -> str | Callable[..., Any] | None:
    """The backend that `compile_stages` asks for; None if stages are not compiled."""
    if isinstance(asked, bool):
        return "inductor" if asked else None
    return device_graphs if asked == NAME else asked


def stage_devices(labels: tuple[str, ...], schedule: Own, asked: int | str) -> tuple[str, ...]:
    """The device of each stage, as the schedule deals stages to devices; `asked` is `stages_per_device`. If `labels`
    has a device twice, it already has one label for each stage."""
    stages_per_device = asked if isinstance(asked, int) else None
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        return labels * (stages_per_device or 1)
    if len(set(labels)) < len(labels) and stages_per_device is None:
        return labels  # dealt by hand
    try:
        return placement(schedule, labels, stages_per_device)
    except ValueError as error:
        raise PlanError(str(error)) from None


def deal(labels: tuple[str, ...], replicas: Sequence[int] | None) -> dict[str, tuple[str, ...]]:
    """Deal the devices to the stages, in order: a dict from the first device of each stage to its other devices. Raises
    PlanError if the counts do not add up or a device is named twice.

    >>> deal(("cpu:0", "cpu:1", "cpu:2"), (2, 1))
    {'cpu:0': ('cpu:1',), 'cpu:2': ()}
    """
    if replicas is None:
        return dict.fromkeys(labels, ())
    counts = tuple(replicas)
    if sum(counts) != len(labels):
        raise PlanError(
            f"replicas is {replicas!r}, which takes {sum(counts)} devices, and devices names {len(labels)}: write "
            f"counts that add up to {len(labels)}, or devices={sum(counts)}"
        )
    if len(set(labels)) < len(labels):
        raise PlanError(f"replicas deals the devices to the stages itself; name each of {list(labels)} once")
    ends = list(accumulate(counts))
    replica_groups = [labels[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return {replica_group[0]: replica_group[1:] for replica_group in replica_groups}


def every_device(options: Options) -> tuple[str, ...]:
    """The labels of the devices of all stages, stage by stage, replicas included."""
    return tuple(label for first in options.devices for label in (first, *options.replicas.get(first, ())))


def candidates(devices: Sequence[str], dealt: Sequence[str] | None) -> list[tuple[str, tuple[str, ...]]]:
    """The schedules that "auto" chooses from, each with the device of every stage. `dealt`: the devices of the stages,
    if they are decided already."""
    found = []
    for name, form in SCHEDULES.items():
        shared = form.shape in ("in turn", "v") and len(set(devices)) < len(devices)
        if name == "forward-only" or (shared and dealt is None):
            continue
        stages = tuple(dealt) if dealt is not None else placement(name, devices)
        try:
            make(name, stages, 1)
        except ValueError:  # not for stages that are dealt like this
            continue
        found.append((name, stages))
    return found


def make_schedule(options: Options, devices: Sequence[str], chunks: int, limit: int | None = None) -> Schedule:
    """The requested schedule, over stages on these devices. `limit` is how many micro-batches fit into the memory of a
    device: it bounds the default warm-up. Raises PlanError if there is no such schedule, or it has no backward."""
    warmup = options.warmup if isinstance(options.warmup, tuple) else None
    limited = limit if options.schedule in WARM and warmup is None else None
    try:
        made = make(options.schedule, devices, chunks, warmup, limited)
    except ValueError as error:
        raise PlanError(str(error)) from None
    if all(action.kind == "F" for action in made.place):
        raise PlanError(f"the schedule {made.name!r} has no backward, and step() trains; call the pipe to run forward")
    return made


def schedule_text(options: Options) -> str:
    """The schedule as the plan states it: its name, or the whole schedule if it is the user's or has a `warmup`."""
    if isinstance(options.schedule, str) and options.warmup == AUTO:
        return options.schedule
    return str(make_schedule(options, options.devices, options.chunks))


def device_labels(devices: int | str | Sequence[str | torch.device] | Cluster) -> tuple[str, ...]:
    """One label per stage. A count means accelerators, such as CUDA devices, if there are enough, else CPU workers; a
    kind, such as "cuda", all accelerators of that kind.

    Each "cpu" without a number is a worker of its own; "cpu:0" twice is one worker with two stages. Raises PlanError if
    a device or cluster is not valid.

    >>> device_labels(["cpu", "cpu"])
    ('cpu:0', 'cpu:1')
    """
    if isinstance(devices, Cluster):
        try:
            clusters.check(devices)
        except ValueError as error:
            raise PlanError(f"devices is a cluster that cannot be used: {error}") from None
        strange = [label for label in devices.labels if not is_local(label)]
        if strange:
            raise PlanError(
                f"devices is a cluster with {', '.join(strange)}, which torch does not know: give its devices the "
                "names that they have on this machine, such as 'cuda:0', or write a count, as in devices=4"
            )
        return devices.labels
    if isinstance(devices, bool) or (isinstance(devices, int) and devices < 1):
        raise PlanError(
            f"devices is {devices}: write a count of at least 1, or a list, as in devices=['cuda:0', 'cuda:1']"
        )
    if isinstance(devices, int):
        enough = accelerator.count() >= devices
        return tuple([str(device) for device in accelerator.present()[:devices]] if enough else _workers(devices))
    if isinstance(devices, str) and devices:
        if meant := _meant(devices):
            raise PlanError(f"{devices!r} in devices is not a device: did you mean devices={meant}?")
        label = _label(devices)
        return _all_of(devices) if ":" not in devices and devices != "cpu" else (label,)
    if not devices:
        raise PlanError(f"devices is {devices!r}: write a count, or a list, as in devices=['cuda:0', 'cuda:1']")
    return tuple(_labels([str(device) for device in devices]))


def _meant(text: str) -> str | None:
    """What is meant by a text that the command line would read as a count or a list, as Python writes it.

    >>> _meant("2"), _meant("cuda:0,cuda:1"), _meant("cuda:0")
    ('2', "['cuda:0', 'cuda:1']", None)
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    return text.strip() if text.strip().isdecimal() else repr(names) if "," in text and names else None


def _workers(count: int) -> list[str]:
    return [f"cpu:{i}" for i in range(count)]


def _all_of(kind: str) -> tuple[str, ...]:
    """The labels of all accelerators of a kind."""
    found = tuple(str(device) for device in accelerator.present() if device.type == kind)
    if not found:
        raise PlanError(
            f"devices is {kind!r}, and this machine has no {kind.upper()} device: write devices=4 for CPU workers"
        )
    return found


def is_local(label: str) -> bool:
    """Whether the label is of a kind that plans can run on. Whether the device exists is found out when something runs.

    >>> is_local("cuda:3"), is_local("V100:3")
    (True, False)
    """
    try:
        torch.device(label)
    except RuntimeError:
        return False
    return True


def _labels(names: list[str]) -> list[str]:
    taken = {name for name in names if ":" in name}
    free = (label for label in _workers(2 * len(names)) if label not in taken)
    return [next(free) if name == "cpu" else _label(name) for name in names]


def _label(name: str) -> str:
    if name == "cpu":
        return "cpu:0"
    kinds = sorted({*accelerator.kinds(), "cuda"})
    try:
        device = torch.device(name)
    except RuntimeError:
        kind, colon, index = name.partition(":")
        near = nearest(kind, kinds)
        hint = "" if near is None else f"; did you mean {near + colon + index!r}?"
        raise PlanError(f"{name!r} in devices is not a device: write 'cpu', 'cpu:1', 'cuda:0'{hint}") from None
    if has_streams(device) and device.index is None:
        here = accelerator.count(device.type) > 0
        return f"{device.type}:{torch.accelerator.current_device_index() if here else 0}"
    return str(device)
