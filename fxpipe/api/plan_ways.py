"""Plans with tensor parallelism: first with one size for all stages, then with a size and a cut of ops for each stage.

size 1, size 2, size 4 ...    a search each, half of the time       with the fastest cut of ops of each size
all sizes, no memory limit    one search                            does its plan fit? Then memory is no limit
all sizes and cuts            one search, with a certificate        cuts that hold less, only if memory is a limit

Each search begins with the fastest plans that were found before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from time import perf_counter

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.device_groups import groups, positions
from fxpipe.ir.plan.hybrid_plan import HybridPlan, over_groups
from fxpipe.pipe.results.plan_alternatives import TriedSize
from fxpipe.planning.hybrid.event_time import fits
from fxpipe.planning.hybrid.plan_request import EXACT, Answer, Request, RequestWay
from fxpipe.planning.hybrid.planners import LEAST_SECONDS, best_of

from .tensor_parallel import Candidate

Find = Callable[[Request], Answer]
Others = Callable[[Candidate], list[Candidate]]


@dataclass(frozen=True)
class WaysAnswer:
    """What was found.

    - `answer`: of the planner, on the cluster's devices; the way of a stage is a position in `candidates`.
    - `candidates`: all that were searched.
    - `tried`: what each size has led to if all stages have it, with its fastest cut of ops.
    - `asked`: what the planner was asked.
    """

    answer: Answer
    candidates: tuple[Candidate, ...]
    tried: tuple[TriedSize, ...]
    asked: Request


def with_ways(
    candidates: Sequence[Candidate],
    refused: Sequence[TriedSize],
    request: Request,
    find: Find,
    mixes: bool,
    others: Others,
) -> WaysAnswer:
    """The plan for candidates of different sizes, each with its fastest cut of ops. `others` gives that candidate, or
    one as fast that holds less, and then those of its size that are slower and hold less. `mixes`: whether the planner
    can give each stage a candidate of its own; if not, others are only tried where no plan fits. Raises PlanError if
    there is no plan."""
    if not mixes or max(one.degree for one in candidates) == 1:
        return _one_for_all(candidates, refused, request, find, others)
    until = perf_counter() + request.seconds
    _nested(candidates)
    found, tried = _each(candidates, replace(request, seconds=request.seconds / 2), find)
    asked = _whole(candidates, request)
    free = find(replace(asked, capped=False, seconds=_left(until) / 2, known=_plans(found)))
    plan = _fitting(asked, free.plan)
    if plan is not None:
        found.append(replace(free, plan=plan))
    best = min((one.seconds for one in found), default=inf) * (1 - EXACT)
    if free.seconds < best:  # memory is a limit
        candidates = _joined(list(map(others, candidates)))
        asked = _whole(candidates, request)
    answer = free
    if answer.certificate is None or answer.certificate.bound < best:
        answer = find(replace(asked, seconds=_left(until), known=_plans(found)))
        found.append(answer)
    rows = (*refused, *(_priced(one, candidates, request.batch / answer.plan.micro_batches) for one in tried))
    return WaysAnswer(_with_proof(answer, found), tuple(candidates), _sorted(rows), asked)


def _left(until: float) -> float:
    return max(until - perf_counter(), LEAST_SECONDS)


def _plans(found: Sequence[Answer]) -> tuple[HybridPlan, ...]:
    return tuple(one.plan for one in found)


def _joined(each: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """The first of each size, at the same positions as before, and then the others."""
    return [*(own[0] for own in each), *(one for own in each for one in own[1:])]


def _fitting(asked: Request, plan: HybridPlan) -> HybridPlan | None:
    """The plan with the least sharding that was asked for with which it fits in memory; None if with none."""
    for sharding in asked.shardings:
        problems = replace(asked, optimizer_sharding=sharding).problems(plan.micro_batches, plan.warmup)
        places = [
            (problems[stage.way], positions(asked.cluster, stage.tensor_parallel, stage.devices))
            for stage in plan.stages
        ]
        if fits(problems[0], plan.stages, places):
            return replace(plan, optimizer_sharding=sharding)
    return None


def _priced(tried: TriedSize, candidates: Sequence[Candidate], batch: float) -> TriedSize:
    """With the prices at which ops were cut, in micro-batches of `batch` samples, if they were."""
    prices = {one.at(batch).price for one in candidates if one.degree == tried.size > 1}
    return replace(tried, prices=tuple(sorted(prices)))


def _sorted(rows: Sequence[TriedSize]) -> tuple[TriedSize, ...]:
    return tuple(sorted(rows, key=lambda one: one.size))


def _with_proof(answer: Answer, found: Sequence[Answer]) -> Answer:
    """The fastest of `found`, with what the search has proven that led to `answer`: that over all candidates."""
    best, proof = min(found, key=lambda one: one.seconds), answer.certificate
    assert proof is not None
    bound = min(proof.bound, best.seconds)
    proof = replace(proof, bound=bound, gap=1 - bound / best.seconds if best.seconds else 0.0)
    unfinished = 0 if proof.proven else sum(one.certificate.unfinished for one in found if one.certificate)
    return replace(best, certificate=replace(proof, unfinished=unfinished))


def _nested(candidates: Sequence[Candidate]) -> None:
    """Raise PlanError if groups of different sizes do not fit in the same devices."""
    for small, large in pairwise(one.degree for one in candidates):
        if large % small:
            raise PlanError(
                f"tensor_parallel: stages of groups of {small} and of {large} devices cannot share a server without "
                f"leaving devices out: give sizes of which each divides the next, as 1, 2, 4, or one of them alone"
            )


def _whole(candidates: Sequence[Candidate], request: Request) -> Request:
    """The request for all candidates at once."""
    ways = tuple(RequestWay(one.degree, one.chains, one.cluster) for one in candidates)
    return replace(request, chains=ways[0].chains, ways=ways)


def _each(candidates: Sequence[Candidate], request: Request, find: Find) -> tuple[list[Answer], list[TriedSize]]:
    """The answer for each candidate with which there is a plan, and what each size has led to. They share the time."""
    until = perf_counter() + request.seconds
    found: list[Answer] = []
    tried: list[TriedSize] = []
    for way, one in enumerate(candidates):
        seconds = max((until - perf_counter()) / (len(candidates) - way), LEAST_SECONDS)
        try:
            found.append(_alone(one, way, replace(request, seconds=seconds), find))
        except PlanError as error:
            tried.append(TriedSize(one.degree, refusal=str(error)))
            continue
        tried.append(TriedSize(one.degree, found[-1].seconds))
    return found, tried


def _alone(one: Candidate, way: int, request: Request, find: Find) -> Answer:
    """The answer if all stages have this candidate, whose position is `way`, on the cluster's devices."""
    answer = find(replace(request, chains=one.chains, cluster=one.cluster))
    return replace(answer, plan=over_groups(answer.plan, groups(request.cluster, one.degree), way))


def _one_for_all(
    candidates: Sequence[Candidate], refused: Sequence[TriedSize], request: Request, find: Find, others: Others
) -> WaysAnswer:
    """The fastest plan all of whose stages have one candidate. For sizes with which no plan fits in memory, cuts of ops
    that hold less are tried."""
    found, tried = _each(candidates, request, find)
    every, rows = list(candidates), list(refused)
    for row, one in zip(tried, candidates, strict=True):
        more = others(one) if row.seconds is None else []
        answers, _ = _each(more, replace(request, seconds=LEAST_SECONDS), find) if more else ([], [])
        found += [replace(each, plan=_moved(each.plan, len(every))) for each in answers]
        every += more
        if answers:
            row = TriedSize(row.size, min(each.seconds for each in answers))
        rows.append(row)
    if not found:
        raise PlanError(rows[-1].refusal)
    best = best_of(found)
    rows = [_priced(row, every, request.batch / best.plan.micro_batches) for row in rows]
    asked = replace(request, chains=candidates[0].chains, cluster=candidates[0].cluster)
    return WaysAnswer(best, tuple(every), _sorted(rows), asked)


def _moved(plan: HybridPlan, by: int) -> HybridPlan:
    """The plan whose ways are so many positions later."""
    return replace(plan, stages=tuple(replace(stage, way=stage.way + by) for stage in plan.stages))
