"""Plans with several stages on each device, for interleaved and V schedules (Narayanan et al., SC 2021, section 2.2).

    replicas 2, stages per device 2     devices   0 1   2 3
    in turn                             stages     0     1      shorter stages fill the pipe sooner
                                                   2     3
    V                                   stages     0     1      the last stage is on the devices of the first
                                                   3     2

For each number of replicas, of stages per device and of micro-batches the layers are cut such that the slowest stage is
fastest. These plans are simulated, those first that may take the least time, until no other can be faster: each device
runs its stages for every micro-batch, after the stages before its first one. Stages of devices that lack memory
recompute. So the plan is the fastest of these; any other plan takes at least the model's work, evenly shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from time import perf_counter

from fxpipe.errors import PlanError
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage
from fxpipe.ir.units import count

from .event_time import Problem, plan_of
from .exact.balanced_stages import balanced
from .plan_request import FEW, Answer, Certificate, Request, work_bound

Placement = Callable[[int, int], Sequence[int]]  # of n devices and v stages on each: the device of each stage
Simulated = tuple[float, Sequence[float]]  # seconds of a step, and the most bytes on a device of each stage


@dataclass(frozen=True)
class LoopedOrder:
    """An order of actions for several stages on each device.

    - `per_device`: the numbers of stages on a device to try.
    - `place`: where the stages stand.
    - `simulate`: a step of a plan.
    """

    per_device: tuple[int, ...]
    place: Placement
    simulate: Callable[[Problem, HybridPlan], Simulated]


@dataclass(frozen=True)
class _Candidate:
    """Stages on groups of devices; no step with them takes less than `bound` seconds."""

    bound: float
    problem: Problem
    stages: tuple[HybridStage, ...]


def looped(request: Request, order: LoopedOrder) -> Answer:
    """The fastest plan with several stages on each device, with a certificate.

    Raises PlanError if there are too few devices or layers, or if no plan fits in memory.
    """
    started = perf_counter()
    problems = [request.problem(m, "early") for m in request.counts(max(len(request.chains), 2 * FEW))]
    candidates = sorted((one for each in problems for one in _candidates(request, each, order)), key=lambda c: c.bound)
    if not candidates:
        chain, times = request.chains[0], min(order.per_device)
        raise PlanError(
            f"{times} stages on each device need two devices and {2 * times} layers at least; the cluster has "
            f"{count(len(request.cluster.devices), 'device', 'devices')}, {chain.model} "
            f"{count(len(chain), 'layer', 'layers')}"
        )
    best, seconds, simulated = None, inf, 0
    for one in candidates:
        if one.bound >= seconds or (best is not None and perf_counter() > started + request.seconds):
            break
        took, plan, tries = _fitting(request, one, order)
        simulated += tries
        if took < seconds:
            best, seconds = plan, took
    if best is None:
        why = " without recomputation" if request.recompute is False else ""
        raise PlanError(
            f"no plan found that fits in memory{why} with several stages on each device: allow recompute, smaller "
            "micro-batches or a larger cluster, or leave out schedule="
        )
    bound = min(seconds, work_bound(request))
    certificate = Certificate(
        bound,
        1 - bound / seconds if seconds else 0.0,
        simulated,
        0,
        perf_counter() - started,
        best.samples is None,
        optimizer_sharding=request.optimizer_sharding,
        most_sharding=request.most_sharding,
    )
    return Answer(best, seconds, certificate)


def _candidates(request: Request, problem: Problem, order: LoopedOrder) -> Iterator[_Candidate]:
    """The cuts for each number of replicas and of stages on a device; if stages may recompute, with and without."""
    n, devices = len(problem.chain), len(problem.cluster.devices)
    free = replace(problem, capped=False)  # how many micro-batches wait in a stage is known when it is simulated
    for replicas in range(1, devices // 2 + 1):
        groups = [tuple(range(at, at + replicas)) for at in range(0, devices - replicas + 1, replicas)]
        for times in order.per_device:
            homes = order.place(len(groups), times)
            for recompute in (False, True) if request.recompute is None else (request.recompute,):
                found = balanced(free, [groups[home] for home in homes], recompute) if len(homes) <= n else None
                if found is not None:
                    stages = tuple(
                        HybridStage(first, end, groups[home], recompute)
                        for (first, end), home in zip(pairwise((0, *found.ends)), homes, strict=True)
                    )
                    yield _Candidate(_bound(problem, stages), problem, stages)


def _bound(problem: Problem, stages: Sequence[HybridStage]) -> float:
    """Seconds that no order of the stages' actions takes less than: a device starts when a micro-batch has come through
    the stages before its first one, and runs all micro-batches through all of its stages."""
    before, starts, loads = 0.0, dict[tuple[int, ...], float](), dict[tuple[int, ...], float]()
    for stage in stages:
        cost = problem.stage(stage.first, stage.end, stage.devices, stage.recompute)
        starts.setdefault(stage.devices, before)
        each = cost.forward + cost.again + cost.backward
        loads[stage.devices] = loads.get(stage.devices, 0.0) + problem.micro_batches * each
        before += cost.forward
    return max(starts[devices] + load for devices, load in loads.items())


def _fitting(request: Request, one: _Candidate, order: LoopedOrder) -> tuple[float, HybridPlan | None, int]:
    """The seconds of the candidate's first plan that fits in memory, that plan, and how many were simulated: as it is,
    with ZeRO-1 or else ZeRO-3 if that may be, and then with recomputation on the devices that lack memory, if that may
    be."""
    stages, tries = one.stages, 0
    while True:
        for sharding in request.shardings:
            plan = replace(plan_of(one.problem, stages), optimizer_sharding=sharding)
            seconds, held = order.simulate(one.problem, plan)
            tries += 1
            rooms = (one.problem.stage(e.first, e.end, e.devices, e.recompute).room for e in stages)
            over = {e.devices for e, most, room in zip(stages, held, rooms, strict=True) if most > room}
            if not over:
                return seconds, plan, tries
        changed = tuple(replace(e, recompute=e.recompute or e.devices in over) for e in stages)
        if request.recompute is False or changed == stages:
            return inf, None, tries
        stages = changed
