"""The planners of hybrid plans by name, each asked in the same way: a `Request` in, an `Answer` out.

    optimal        the least event time, with a bound (optimal.py)
    dapple         DAPPLE's planner as published (dapple.py)
    pipedream      PipeDream's, which balances the steady state (pipedream.py)
    gpipe          a device for each stage, the variance of their times least (block_partition.py)
    straight       a device for each stage, the slowest as fast as can be (data_parallel.py)
    data parallel  one stage on all devices (data_parallel.py)

All but the first say only how to cut and place; here they are tried with each number of micro-batches and each warm-up
that the request leaves open, stages that do not fit recompute if they may, and the fastest plan by event time wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

from fxpipe.errors import PlanError
from fxpipe.ir.cluster import cluster as clusters
from fxpipe.ir.cluster.cluster import Cluster, link
from fxpipe.ir.plan import layer_chain as chains
from fxpipe.ir.plan.hybrid_plan import WARMUPS, HybridPlan, HybridStage, warmup_of
from fxpipe.ir.plan.layer_chain import Chain
from fxpipe.planning.hybrid.exact.optimal_plan import Certificate, optimal

from .block_partition import least_variance
from .dapple import dapple
from .data_parallel import one_each, whole
from .device_placement import servers
from .event_time import Problem, event_time
from .pipedream import Level, pipedream

MOST_MICRO_BATCHES = 256
FEW = 4  # numbers of micro-batches that a planner tries which takes its time over each
LEAST_SECONDS = 0.5  # for a search, whatever the others took
SLOW_DEVICES = 32  # from so many devices on, DAPPLE's search takes longer than anybody waits for something to compare

Stages = tuple[HybridStage, ...]


@dataclass(frozen=True)
class Request:
    """What plans are for: the same layers as one or several `chains`, at the micro-batches that their costs are known
    for (others are scaled from the nearest), for steps of `batch` samples. What is None is for the planner to choose:
    `micro_batches`, `warmup`, and `recompute`, whether all stages do, none, or those that do not fit. `copies` is how
    many bytes are in memory for each byte of parameters, `seconds` how long a search may take."""

    chains: tuple[Chain, ...]
    cluster: Cluster
    batch: int
    micro_batches: int | None = None
    warmup: str | None = None
    recompute: bool | None = None
    all_reduce: str = "end"
    copies: float = 4
    seconds: float = 30

    def problem(self, micro_batches: int, warmup: str) -> Problem:
        chain = chains.nearest(self.chains, self.batch / micro_batches)
        return Problem(chain, self.cluster, micro_batches, warmup, self.all_reduce, self.copies)


@dataclass(frozen=True)
class Answer:
    """A plan, the seconds of its step by event time, and, where the planner knows one, how good it is."""

    plan: HybridPlan
    seconds: float
    certificate: Certificate | None = None


def check(request: Request) -> None:
    """Raise PlanError where there is nothing to plan for."""
    try:
        for chain in request.chains:
            chains.check(chain)
        clusters.check(request.cluster)
    except ValueError as error:
        raise PlanError(f"cannot plan: {error}") from None
    if request.batch < 1:
        raise PlanError(f"batch_size is {request.batch}; a step has at least one sample")
    given = request.micro_batches
    if given is not None and not 1 <= given <= request.batch:
        raise PlanError(
            f"{given} micro-batches of a batch of {request.batch}; write a number from 1 to {request.batch}"
        )
    if request.warmup not in (None, *WARMUPS):
        raise PlanError(f"there is no warm-up {request.warmup!r}; there are {', '.join(WARMUPS)}")


def search(planner: str, request: Request) -> Answer:
    """The plan of the planner of this name. Raises PlanError where there is no such planner, the request cannot be
    planned for, or no plan fits in memory."""
    if planner not in PLANNERS:
        raise PlanError(f"there is no planner {planner!r}; write one of {', '.join(map(repr, PLANNERS))}")
    check(request)
    return PLANNERS[planner](request)


def counts(request: Request, most: int = MOST_MICRO_BATCHES) -> list[int]:
    """The numbers of micro-batches to try: the one asked for, or those that divide the batch, with the ones nearest to
    four for each device first to stay if `most` are too few."""
    if request.micro_batches is not None:
        return [request.micro_batches]
    every = [m for m in range(1, min(request.batch, MOST_MICRO_BATCHES) + 1) if request.batch % m == 0]
    wanted = 4 * len(request.cluster.devices)
    near = sorted(every, key=lambda m: max(m / wanted, wanted / m))
    return sorted(near[:most])


def _optimal(request: Request) -> Answer:
    several = request.micro_batches is None and len(request.chains) > 1
    return _each_optimal(request) if several else _one_optimal(request, request.micro_batches, request.seconds)


def _each_optimal(request: Request) -> Answer:
    """With costs at several micro-batches, each number of micro-batches is searched by itself, the most promising
    first, and is left out where even its work alone, evenly shared, takes longer than the best plan."""
    until, devices = perf_counter() + request.seconds, len(request.cluster.devices)
    work = {}
    for m in counts(request, len(request.chains)):
        chain = request.problem(m, "early").chain
        work[m] = m * (chain.forwards[-1] + chain.backwards[-1]) / devices
    found: list[Answer] = []
    refusals: list[PlanError] = []
    for left, m in zip(range(len(work), 0, -1), sorted(work, key=work.__getitem__), strict=True):
        if found and work[m] >= min(answer.seconds for answer in found):
            break  # and so do all that follow
        try:
            found.append(_one_optimal(request, m, max((until - perf_counter()) / left, LEAST_SECONDS)))
        except PlanError as error:
            refusals.append(error)
    if not found:
        raise refusals[-1]
    return _best(found)


def _best(found: Sequence[Answer]) -> Answer:
    """The fastest, with a certificate for all of them."""
    best = min(found, key=lambda answer: answer.seconds)
    proofs = [answer.certificate for answer in found if answer.certificate is not None]
    bound = min(best.seconds, *(proof.bound for proof in proofs))
    certificate = Certificate(
        bound,
        1 - bound / best.seconds if best.seconds else 0.0,
        sum(proof.simulated for proof in proofs),
        sum(proof.branches for proof in proofs),
        sum(proof.seconds for proof in proofs),
    )
    return replace(best, certificate=certificate)


def _one_optimal(request: Request, micro_batches: int | None, seconds: float) -> Answer:
    chain = request.chains[0] if micro_batches is None else request.problem(micro_batches, "early").chain
    found = optimal(
        chain,
        request.cluster,
        request.batch,
        micro_batches=micro_batches,
        warmup=request.warmup,
        recompute=request.recompute,
        all_reduce=request.all_reduce,
        copies=request.copies,
        seconds=seconds,
    )
    return Answer(found.plan, found.time, found.certificate)


def _tried(stages_of: Callable[[Problem], Stages], few: bool = False) -> Callable[[Request], Answer]:
    """A planner from a way to cut and place."""

    def planner(request: Request) -> Answer:
        best: tuple[float, HybridPlan] | None = None
        for m in counts(request, FEW if few else MOST_MICRO_BATCHES):
            for warmup in _warmups(request):
                problem = request.problem(m, warmup)
                stages = recomputing(problem, stages_of(problem), request.recompute)
                seconds = event_time(problem, stages)
                if seconds < (best[0] if best else inf):
                    best = seconds, HybridPlan(request.chains[0].model, stages, m, warmup, request.all_reduce)
        if best is None:
            why = " without recomputation" if request.recompute is False else ""
            raise PlanError(f"{request.chains[0].model} does not fit in memory like that{why}")
        return Answer(best[1], best[0])

    return planner


def _warmups(request: Request) -> Sequence[str]:
    return WARMUPS if request.warmup is None else (request.warmup,)


def recomputing(problem: Problem, stages: Stages, recompute: bool | None) -> Stages:
    """The stages, all with recomputation, none, or (None) those that do not fit without."""
    if recompute is not None:
        return tuple(replace(stage, recompute=recompute) for stage in stages)

    def lacks(s: int, stage: HybridStage) -> bool:
        cost = problem.stage(stage.first, stage.end, stage.devices, False)
        return cost.held(warmup_of(problem.warmup, s, len(stages), problem.micro_batches)) > cost.room

    return tuple(replace(stage, recompute=lacks(s, stage)) for s, stage in enumerate(stages))


# Ways to cut and place ----------------------------------------------------------------------------------------------


def _one_each(problem: Problem) -> Stages:
    stages = one_each(problem)
    if not stages:
        raise PlanError(_too_few(problem))
    return stages


def _least_variance(problem: Problem) -> Stages:
    devices = len(problem.cluster.devices)
    if len(problem.chain) < devices:
        raise PlanError(_too_few(problem))
    sizes = least_variance([layer.forward + layer.backward for layer in problem.chain.layers], devices)
    ends = [sum(sizes[: s + 1]) for s in range(devices)]
    return tuple(HybridStage(end - size, end, (s,)) for s, (end, size) in enumerate(zip(ends, sizes, strict=True)))


def _too_few(problem: Problem) -> str:
    devices = len(problem.cluster.devices)
    return f"{problem.chain.model} has {len(problem.chain)} layers: they cannot be cut into {devices} stages"


def _dapple(problem: Problem) -> Stages:
    """Where nothing fits, the plan for endless memory, whose stages may fit if they recompute."""
    try:
        return dapple(problem).stages
    except PlanError:
        return dapple(replace(problem, capped=False)).stages


def _pipedream(problem: Problem) -> Stages:
    """Levels count neighbours; the cluster's own positions follow."""
    groups = servers(problem.cluster)
    order = [position for group in groups for position in group]
    stages = pipedream(problem.chain, levels(problem.cluster))
    return tuple(replace(e, devices=tuple(sorted(order[device] for device in e.devices))) for e in stages)


def levels(cluster: Cluster) -> list[Level]:
    """Servers and the network between them, where all have as many devices; else one level for all. A server's card is
    what its devices share."""
    groups = servers(cluster)
    labels, size = cluster.labels, len(groups[0])
    if any(len(group) != size for group in groups):
        least = min(link(cluster, labels[0], other).bandwidth for other in labels[1:])
        return [Level(len(labels), least)]
    found = []
    if size > 1:
        found.append(Level(size, link(cluster, labels[groups[0][0]], labels[groups[0][1]]).bandwidth))
    if len(groups) > 1:
        found.append(Level(len(groups), link(cluster, labels[groups[0][0]], labels[groups[1][0]]).bandwidth))
    return found or [Level(1, 1.0)]


PLANNERS: dict[str, Callable[[Request], Answer]] = {
    "optimal": _optimal,
    "dapple": _tried(_dapple, few=True),
    "pipedream": _tried(_pipedream, few=True),
    "gpipe": _tried(_least_variance),
    "straight": _tried(_one_each),
    "data parallel": _tried(whole),
}
