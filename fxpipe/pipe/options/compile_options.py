"""The options of `fxpipe.compile`, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxpipe.errors import PlanError, did_you_mean, nearest
from fxpipe.ir.cluster import cluster as clusters
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.plan.plan_file import PlanFile
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.sample_lists import BatchDim
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.units import count
from fxpipe.passes import Pass
from fxpipe.pipe.build.compiled.device_graphs import NAME, device_graphs, refusal
from fxpipe.planning.stages.manual_cuts import begins
from fxpipe.planning.stages.plan_stages import GOALS
from fxpipe.runtime import accelerator
from fxpipe.runtime.accelerator import has_streams
from fxpipe.schedules.make_schedule import AUTO, SCHEDULES, STRAIGHT, WARM, Own, make, placement
from fxpipe.torch_internals.compiling.inductor import records_graphs

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
    def coded(self) -> bool:
        """Whether generated code computes the gradients of a step, in the stages where it can."""
        if self.backward != AUTO:
            return self.backward == "code"
        from fxpipe.torch_internals.tracing.tensors_without_memory import SYMBOLIC_SIZES  # late: takes a second

        return not autograd_because(self) and SYMBOLIC_SIZES.there

    @property
    def known_reduce(self) -> str | Mapping[str, str] | None:
        """How outputs are combined, as far as the user says it."""
        return None if self.reduce == AUTO else self.reduce


def check(options: Options) -> Options:
    """The same options. Raises PlanError if they contradict each other, whatever the model."""
    n = len(options.devices)
    if isinstance(options.checkpoint, frozenset) and not options.checkpoint <= set(range(n)):
        unknown = sorted(options.checkpoint - set(range(n)))
        raise PlanError(f"checkpoint names the stages {unknown}: there are stages 0 to {n - 1}")
    for s in sorted(options.offload):
        if not 0 <= s < n:
            raise PlanError(f"offload names stage {s}: there are stages 0 to {n - 1}")
        if not has_streams(torch.device(options.devices[s].partition(":")[0])):
            raise PlanError(
                f"offload names stage {s}, which is on {options.devices[s]}: what a stage keeps is moved from an "
                "accelerator to host memory; leave it out, or recompute with checkpoint="
            )
    if (names := begins(options.cut)) is not None and len(names) != n - 1:
        raise PlanError(
            f"cut names {count(len(names), 'module', 'modules')}, which makes {len(names) + 1} stages, but there are "
            f"{n} devices: name {count(n - 1, 'module', 'modules')}"
            + (did_you_mean(names[0], GOALS) if len(names) == 1 else "")
        )
    if options.memory_limit is not None:
        check_limit(options)
    because = autograd_because(options)
    if because and options.backward == "code":
        raise PlanError(f"backward='code' does not go with {because} yet: leave out one of them")
    if not options.coded and "selective" in recomputations(options):
        raise PlanError(
            "checkpoint='selective' says for each value whether it is kept, and autograd decides that by itself: "
            + _needs_code(options, "write 'except_last'")
        )
    if options.overlap_pairs:
        check_pairs(options)
    check_graphs(options)
    if options.place is not None:
        check_placed(options)
    elif options.schedule != AUTO:
        make_schedule(options, options.devices, options.chunks)
    return options


def recomputations(options: Options) -> tuple[str, ...]:
    """The modes of the stages, as far as options say them."""
    planned = () if options.plan is None else tuple(stage.checkpoint for stage in options.plan.stages)
    return (options.checkpoint, *planned) if isinstance(options.checkpoint, str) else planned


def check_limit(options: Options) -> None:
    """Raise PlanError for options with which recomputation cannot be chosen by memory."""
    if options.place is not None:
        raise PlanError("memory_limit chooses what stages recompute, which a strategy does not have: leave it out")
    if options.checkpoint != AUTO:
        raise PlanError("memory_limit chooses what is recomputed, and checkpoint says it: leave out one of them")
    if options.offload:
        raise PlanError("memory_limit does not go with offload: leave out one of them")
    workers = any(label.startswith("cpu") for label in options.devices)
    if workers and options.memory_limit == DEVICE_MEMORY and options.cluster is None:
        raise PlanError(
            f"memory_limit is {DEVICE_MEMORY!r}, and CPU workers share the memory of the machine: write the bytes that "
            "each may keep for backward, as in memory_limit=2 * 10**9"
        )


def autograd_because(options: Options) -> str:
    """What of the options generated backward does not go with, as words; "" if nothing."""
    plan = options.plan
    shards = options.ranks and plan and plan.optimizer_sharding == "zero3" and any(options.replicas.values())
    found = {
        "compile_stages='device_graphs'": options.compile_stages == NAME,
        "a plan that cuts operators": options.place is not None,
        "a plan that shards parameters (ZeRO-3)": shards,
        "offload": bool(options.offload),
    }
    return next((name for name, given in found.items() if given), "")


def _needs_code(options: Options, otherwise: str) -> str:
    """What to write where generated backward is needed: the end of an error."""
    if options.backward == AUTO:
        return f"leave out {autograd_because(options)}, which has no generated backward, or {otherwise}"
    return f"add backward='code', or {otherwise}"


def check_pairs(options: Options) -> None:
    """Raise PlanError for options with which a forward and a backward cannot run as one function."""
    if not options.coded:
        raise PlanError(
            "overlap_pairs puts the lines of a forward and of a backward into one function, and autograd computes "
            f"backward: {_needs_code(options, 'leave out overlap_pairs')}"
        )
    if options.compile_stages:
        raise PlanError("overlap_pairs does not go with compile_stages yet: leave out one of them")
    if options.ranks:
        raise PlanError(
            "overlap_pairs does not go with devices that are processes yet: leave it out, or run all devices in one "
            "process"
        )


def check_placed(options: Options) -> None:
    """Raise PlanError for options that do not go with a strategy, which places all ops."""
    if isinstance(options.schedule, str) and options.schedule in {*SCHEDULES, AUTO} - {*STRAIGHT}:
        raise PlanError(
            f"schedule is {options.schedule!r}; with a strategy, write one of {', '.join(STRAIGHT)}, or a grid"
        )
    if not isinstance(options.checkpoint, str):
        raise PlanError(
            "checkpoint is of stages, which a strategy does not have; write 'never', 'except_last' or 'always'"
        )


def backend_of(asked: bool | str | Callable[..., Any]) -> str | Callable[..., Any] | None:
    """The backend that `compile_stages` asks for; None if stages are not compiled."""
    if isinstance(asked, bool):
        return "inductor" if asked else None
    return device_graphs if asked == NAME else asked


def check_graphs(options: Options) -> None:
    """Raise PlanError for graphs on devices that have none, and for torch's own, which do not suit micro-batches."""
    backend = backend_of(options.compile_stages)
    devices = [torch.device(label) for label in options.devices if is_local(label)]
    if backend == "cudagraphs" or (backend == "inductor" and any(map(has_streams, devices)) and records_graphs()):
        asked = (
            "is 'cudagraphs'" if backend == "cudagraphs" else "is for Inductor, with torch's config.triton.cudagraphs"
        )
        raise PlanError(
            f"compile_stages {asked}: such graphs keep results where their next run writes, and a pipe has results of "
            f"several micro-batches at a time; write compile_stages={NAME!r}"
        )
    for device in devices:
        if backend is device_graphs and (reason := refusal(device)):
            raise PlanError(f"compile_stages is {NAME!r}, and {reason}: leave it out, or name another backend")


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
