"""Plans with tensor parallelism: first with one size for all stages, then with a size for each stage.

size 1, size 2, size 4 ...    a search each, half of the time       the fastest plans are where the next one begins
all sizes                     one search, with a certificate        each stage has its own
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.device_groups import groups
from fxpipe.ir.plan.hybrid_plan import over_groups
from fxpipe.pipe.results.plan_alternatives import TriedSize
from fxpipe.planning.hybrid.plan_request import Answer, Request, RequestWay
from fxpipe.planning.hybrid.planners import LEAST_SECONDS, best_of

from .tensor_parallel import Candidate


def with_ways(
    candidates: Sequence[Candidate],
    refused: Sequence[TriedSize],
    request: Request,
    find: Callable[[Request], Answer],
    mixes: bool,
) -> tuple[Answer, tuple[TriedSize, ...], Request]:
    """The answer of a planner, on the cluster's devices; what each size has led to if all stages have it; and what
    was asked. The way of a stage is a position in `candidates`. `mixes`: whether the planner can give each stage a size
    of its own. Raises PlanError if there is no plan."""
    until, both = perf_counter() + request.seconds, mixes and len(candidates) > 1
    if both:
        _nested(candidates)
    seconds = request.seconds / 2 if both else request.seconds
    whole = _whole(candidates, request)
    found, tried = _each(candidates, replace(request, seconds=seconds), find)
    rows = tuple(sorted((*refused, *tried), key=lambda one: one.size))
    if both:
        left = max(until - perf_counter(), LEAST_SECONDS)
        answer = find(replace(whole, seconds=left, known=tuple(one.plan for one in found)))
        return _with_proof(answer, found), rows, whole
    if not found:
        raise PlanError(rows[-1].refusal)
    return best_of(found), rows, whole


def _with_proof(answer: Answer, found: Sequence[Answer]) -> Answer:
    """The fastest answer, with what the search over all sizes has proven. `found`: those with one size each."""
    best, proof = min((answer, *found), key=lambda one: one.seconds), answer.certificate
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
    """The request for all ways at once."""
    ways = tuple(RequestWay(one.degree, one.chains, one.cluster) for one in candidates)
    if len(ways) > 1:
        return replace(request, chains=ways[0].chains, ways=ways)
    return replace(request, chains=ways[0].chains, cluster=ways[0].cluster)


def _each(
    candidates: Sequence[Candidate], request: Request, find: Callable[[Request], Answer]
) -> tuple[list[Answer], list[TriedSize]]:
    """The answer for each size with which there is a plan, and what each size has led to. The sizes share the time."""
    until = perf_counter() + request.seconds
    found: list[Answer] = []
    tried: list[TriedSize] = []
    for way, one in enumerate(candidates):
        seconds = max((until - perf_counter()) / (len(candidates) - way), LEAST_SECONDS)
        try:
            answer = find(replace(request, chains=one.chains, cluster=one.cluster, seconds=seconds))
        except PlanError as error:
            tried.append(TriedSize(one.degree, refusal=str(error)))
            continue
        found.append(replace(answer, plan=over_groups(answer.plan, groups(request.cluster, one.degree), way)))
        tried.append(TriedSize(one.degree, answer.seconds))
    return found, tried
