"""The planners of hybrid plans by name: each takes a `Request` and gives an `Answer`.

    optimal        the least event time, with a bound (exact/optimal_plan.py)
    dapple         DAPPLE's planner as published (dapple.py)
    pipedream      PipeDream's, which balances the steady state (pipedream.py)
    gpipe          a device for each stage, with the least variance of stage times (simple_plans.py)
    straight       a device for each stage, with the fastest slowest stage (simple_plans.py)
    data parallel  one stage on all devices (simple_plans.py)

All but the first only cut and place. Here they are tried with each number of micro-batches and each warm-up that the
request leaves open; stages that do not fit recompute if they may; the fastest plan by event time is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from time import perf_counter

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster, link
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage, warmup_of
from fxpipe.planning.hybrid.exact.optimal_plan import optimal

from .dapple import DappleSearch
from .device_placement import servers
from .event_time import Problem, event_time, plan_of
from .pipedream import Level, pipedream
from .plan_request import FEW, MOST_MICRO_BATCHES, Answer, Certificate, Request, check
from .simple_plans import gpipe, one_each, whole

LEAST_SECONDS = 0.5  # for a search, whatever the others took

Stages = tuple[HybridStage, ...]


def search(planner: str, request: Request) -> Answer:
    """The answer of the planner of this name. Raises PlanError if there is no such planner, the request cannot be
    planned for, or no plan fits in memory."""
    if planner not in PLANNERS:
        raise PlanError(f"there is no planner {planner!r}; write one of {', '.join(map(repr, PLANNERS))}")
    check(request)
    return PLANNERS[planner](request)


def best_of(found: Sequence[Answer]) -> Answer:
    """The fastest, with a certificate for all of them, if they have one."""
    best = min(found, key=lambda answer: answer.seconds)
    proofs = [answer.certificate for answer in found if answer.certificate is not None]
    if len(proofs) < len(found):
        return best
    bound = min(best.seconds, *(proof.bound for proof in proofs))
    certificate = Certificate(
        bound,
        1 - bound / best.seconds if best.seconds else 0.0,
        sum(proof.simulated for proof in proofs),
        sum(proof.branches for proof in proofs),
        sum(proof.seconds for proof in proofs),
        best.plan.samples is None,
        sum(proof.unfinished for proof in proofs),
        proofs[0].optimizer_sharding,
        most_sharding=proofs[0].most_sharding,
    )
    return replace(best, certificate=certificate)


def _tried(stages_of: Callable[[Problem], Stages], most: int = MOST_MICRO_BATCHES) -> Callable[[Request], Answer]:
    """A planner from a function that cuts and places, for at most so many numbers of micro-batches."""

    def planner(request: Request) -> Answer:
        return _fastest(request, _problems(request, most), stages_of)

    return planner


def _problems(request: Request, most: int) -> list[Problem]:
    """A problem for each of `Request.searches`, each warm-up and each of at most `most` numbers of micro-batches."""
    pairs = [(m, warmup) for m in request.counts(most) for warmup in request.warmups]
    return [one.problem(*pair) for one in request.searches for pair in pairs]


def _fastest(request: Request, problems: Sequence[Problem], stages_of: Callable[[Problem], Stages]) -> Answer:
    """The fastest plan of all problems, cut and placed by `stages_of`. Raises PlanError if none fits in memory."""
    best: tuple[float, HybridPlan] | None = None
    for problem in problems:
        stages = recomputing(problem, stages_of(problem), request.recompute)
        seconds = event_time(problem, stages)
        if seconds < (best[0] if best else inf):
            best = seconds, plan_of(problem, stages)
    if best is None:
        why = " without recomputation" if request.recompute is False else ""
        raise PlanError(f"{request.chains[0].model} does not fit in memory like that{why}")
    return Answer(best[1], best[0])


def recomputing(problem: Problem, stages: Stages, recompute: bool | None) -> Stages:
    """The stages, all with recomputation, none, or (None) those that do not fit without."""
    if recompute is not None:
        return tuple(replace(stage, recompute=recompute) for stage in stages)

    def lacks(s: int, stage: HybridStage) -> bool:
        cost = problem.stage(stage.first, stage.end, stage.devices, False)
        return cost.held(warmup_of(problem.warmup, s, len(stages), problem.micro_batches)) > cost.room

    return tuple(replace(stage, recompute=lacks(s, stage)) for s, stage in enumerate(stages))


# Ways to cut and place ----------------------------------------------------------------------------------------------


def _dapple(request: Request) -> Answer:
    """DAPPLE's plan for few numbers of micro-batches, as its search is slow: on many servers of several devices each it
    may take hours. The searches share the time; one that does not end gives its best plan so far."""
    until, problems = perf_counter() + request.seconds, _problems(request, FEW)
    left, unfinished = len(problems), 0

    def stages_of(problem: Problem) -> Stages:
        nonlocal left, unfinished
        search, now = DappleSearch(problem, recomputes=True), perf_counter()
        unfinished += not search.run(now + (until - now) / left)
        left -= 1
        return search.best[1]

    answer = _fastest(request, problems, stages_of)
    return replace(answer, unfinished=unfinished)


def _pipedream(problem: Problem) -> Stages:
    """PipeDream's stages, with its numbers of devices, server by server, turned into positions in the cluster. Its
    devices are alike, so all are taken to be as slow as the slowest."""
    groups = servers(problem.cluster)
    order = [position for group in groups for position in group]
    stages = pipedream(problem.slow, levels(problem.cluster))
    return tuple(replace(e, devices=tuple(sorted(order[device] for device in e.devices))) for e in stages)


def levels(cluster: Cluster) -> list[Level]:
    """PipeDream's levels: the servers and the network between them, or one level for all devices if servers differ in
    size. The bandwidth between servers is that of a network card, which the devices of a server share."""
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
    "optimal": optimal,
    "dapple": _dapple,
    "pipedream": _tried(_pipedream, FEW),
    "gpipe": _tried(gpipe),
    "straight": _tried(one_each),
    "data parallel": _tried(whole),
}
