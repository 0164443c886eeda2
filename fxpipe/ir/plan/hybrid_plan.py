"""A hybrid plan: pipeline stages, each of which may be several replicas that share its micro-batches.

VGG-19: 2 stages 15:1, 32 micro-batches, early warm-up, all-reduce at the end, ideal shares
stage  layers    devices
0      0 .. 17   0-14
1      18 .. 24  15

Data parallelism is the plan of one stage, a plain pipeline the one whose stages have a device each ("straight").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tabulate import tabulate

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.replica_shares import uneven
from fxpipe.ir.units import count

from .model_states import OPTIMIZER_SHARDINGS, ZERO

# How many micro-batches a stage runs forward before its first backward, for stage s of n: n - s, which just fills the
# pipe (DAPPLE's P_A), or 2 (n - s) - 1, which also hides transfers (its P_B).
WARMUPS = ("early", "late")
# One all-reduce of all parameters of a stage after its last backward, or one per layer once its gradient is whole.
ALL_REDUCES = ("end", "overlap")


@dataclass(frozen=True, slots=True)
class HybridStage:
    """One stage: layers `first` to `end` - 1.

    - `devices`: positions in the cluster, ascending; in turn `tensor_parallel` of them are a replica, and each replica
      takes a share of every micro-batch. In interleaved and V schedules several stages have the same devices.
    - `recompute`: whether only what the stage takes is kept, and forward runs again in backward.
    - `tensor_parallel`: over how many devices each op is cut; above 1, these are a group of
      `fxpipe.ir.cluster.device_groups`.
    - `way`: which of the ways to cut its ops the stage has, as a position in `Planned.ways`.
    """

    first: int
    end: int
    devices: tuple[int, ...]
    recompute: bool = False
    tensor_parallel: int = 1
    way: int = 0

    @property
    def replicas(self) -> int:
        """How many groups of devices run the stage."""
        return len(self.devices) // self.tensor_parallel

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each replica."""
        size = self.tensor_parallel
        return tuple(self.devices[at : at + size] for at in range(0, len(self.devices), size))


@dataclass(frozen=True)
class HybridPlan:
    """The stages in order, for a step of `micro_batches` micro-batches. Check with `check`, print with `str`.

    - `samples`: those of a micro-batch, which replicas share as `fxpipe.ir.replica_shares` deals them; None if shares
      are ideal.
    - `optimizer_sharding`: what the replicas of a stage share out: "none"; "zero1": the optimizer's state; "zero3":
      also parameters and gradients. With "zero3" nothing is left for an all-reduce.
    """

    model: str
    stages: tuple[HybridStage, ...]
    micro_batches: int
    warmup: str = "early"
    all_reduce: str = "end"
    samples: int | None = None
    optimizer_sharding: str = "none"

    @property
    def shards_optimizer(self) -> bool:
        """Whether some device keeps only a part of the optimizer's state for its stages."""
        return self.optimizer_sharding != "none" and any(stage.replicas > 1 for stage in self.stages)

    def __str__(self) -> str:
        return show(self)


def warmup_of(policy: str, stage: int, stages: int, micro_batches: int) -> int:
    """How many forwards stage number `stage` of `stages` runs before its first backward.

    >>> [warmup_of("late", s, 3, 4) for s in range(3)]
    [4, 3, 1]
    """
    ahead = stages - stage if policy == "early" else 2 * (stages - stage) - 1
    return min(micro_batches, ahead)


def shape(stages: Sequence[HybridStage]) -> str:
    """The replicas of each stage, as papers write them: "8:8", "straight", or "DP" for one stage; if devices have
    several stages each, those of the first ones, and how many.

    >>> shape([HybridStage(0, 3, (0, 1)), HybridStage(3, 5, (2,))])
    '2:1'
    >>> shape([HybridStage(s, s + 1, devices) for s, devices in enumerate([(0, 1), (2, 3)] * 2)])
    '2:2 x 2'
    """
    replicas = list({stage.devices: stage.replicas for stage in stages}.values())
    several = f" x {len(stages) // len(replicas)}" if len(stages) > len(replicas) else ""
    if len(replicas) == 1:
        return f"DP{several}"
    return ("straight" if max(replicas) == 1 else ":".join(map(str, replicas))) + several


def tensor_parallel(stages: Sequence[HybridStage]) -> str:
    """The tensor-parallel sizes of stages, as a part of a line: empty if no op is cut.

    >>> tensor_parallel([HybridStage(0, 1, (0, 1, 2, 3), tensor_parallel=2), HybridStage(1, 2, (4,))])
    ', tensor parallel 2:1'
    """
    sizes = [stage.tensor_parallel for stage in stages]
    if max(sizes) == 1:
        return ""
    return f", tensor parallel {':'.join(map(str, sizes if len(set(sizes)) > 1 else sizes[:1]))}"


def over_groups(plan: HybridPlan, groups: Sequence[tuple[int, ...]], way: int = 0) -> HybridPlan:
    """The plan on devices, of one whose positions are those of groups of devices of one size."""
    stages = (
        replace(
            stage,
            devices=tuple(device for at in stage.devices for device in groups[at]),
            tensor_parallel=len(groups[0]),
            way=way,
        )
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def cuts(stages: Sequence[HybridStage]) -> tuple[int, ...]:
    """The layers before which the inner cuts lie."""
    return tuple(stage.first for stage in stages[1:])


def check(plan: HybridPlan, layers: int, devices: int) -> None:
    """Raise ValueError if the plan is not one for this many layers and devices."""
    if plan.micro_batches < 1:
        raise ValueError(f"the plan has {plan.micro_batches} micro-batches; it needs at least one")
    if plan.warmup not in WARMUPS or plan.all_reduce not in ALL_REDUCES:
        raise ValueError(f"warm-up {plan.warmup!r} of {WARMUPS}, all-reduce {plan.all_reduce!r} of {ALL_REDUCES}")
    if plan.optimizer_sharding not in OPTIMIZER_SHARDINGS:
        raise ValueError(f"optimizer sharding {plan.optimizer_sharding!r} of {OPTIMIZER_SHARDINGS}")
    ends = [0, *(stage.end for stage in plan.stages)]
    for index, stage in enumerate(plan.stages):
        if stage.first != ends[index] or stage.end <= stage.first:
            raise ValueError(f"stage {index} has layers {stage.first} to {stage.end - 1}; it starts at {ends[index]}")
    if ends[-1] != layers:
        raise ValueError(f"the stages have {ends[-1]} layers, the model {layers}")
    used: dict[int, tuple[int, ...]] = {}
    for index, stage in enumerate(plan.stages):
        if not stage.devices or any(a >= b for a, b in pairwise(stage.devices)):
            raise ValueError(f"stage {index} is on devices {stage.devices}; give at least one, ascending")
        if not set(stage.devices) <= set(range(devices)):
            raise ValueError(f"stage {index} is on devices {stage.devices}, of {devices}")
        if stage.tensor_parallel < 1 or len(stage.devices) % stage.tensor_parallel:
            raise ValueError(
                f"stage {index} is on {len(stage.devices)} devices, and each op is cut over {stage.tensor_parallel}: "
                "give a whole number of groups"
            )
        for device in stage.devices:
            if used.setdefault(device, stage.devices) != stage.devices:
                raise ValueError(
                    f"stage {index} is on devices {stage.devices}, and another one on {used[device]}: two stages share "
                    "all of their devices or none"
                )


def show(plan: HybridPlan) -> str:
    """A table, one stage per line."""
    when = "at the end" if plan.all_reduce == "end" else "overlapped"
    stages = count(len(plan.stages), "stage", "stages")
    head = f"{plan.model}: {stages} {shape(plan.stages)}, {count(plan.micro_batches, 'micro-batch', 'micro-batches')}, "
    head += f"{plan.warmup} warm-up, all-reduce {when}"
    head += tensor_parallel(plan.stages)
    if plan.shards_optimizer:
        head += f", {ZERO[plan.optimizer_sharding]}"
    if plan.samples is None and any(stage.replicas > 1 for stage in plan.stages):
        head += ", ideal shares"
    rows = [
        (
            index,
            f"{stage.first} .. {stage.end - 1}",
            ranges(stage.devices),
            "recomputes" if stage.recompute else "",
            "" if plan.samples is None else uneven(plan.samples, stage.replicas),
        )
        for index, stage in enumerate(plan.stages)
    ]
    table = tabulate(rows, ("stage", "layers", "devices", "", ""), tablefmt="plain", disable_numparse=True)
    return "\n".join([head, *(line.rstrip() for line in table.splitlines())])


def replica_group(cluster: Cluster, devices: Sequence[int]) -> str:
    """The devices of a stage as the cluster calls them, neighbours joined: "V100:0-7"."""
    return joined([cluster.labels[device] for device in devices])


def joined(labels: Sequence[str]) -> str:
    """Labels of devices, neighbours joined.

    >>> joined(["cpu:1", "cpu:2"]), joined(["cpu:0", "cuda:0"])
    ('cpu:1-2', 'cpu:0, cuda:0')
    """
    kinds = {label.rpartition(":")[0] for label in labels}
    numbers = [label.rpartition(":")[2] for label in labels]
    if len(kinds) == 1 and all(number.isdecimal() for number in numbers):
        return f"{kinds.pop()}:{ranges(map(int, numbers))}"
    return ", ".join(labels)


def ranges(numbers: Iterable[int]) -> str:
    """Numbers, neighbours joined.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
