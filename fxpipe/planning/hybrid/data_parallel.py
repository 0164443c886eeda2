"""Data parallelism and the plain pipeline, as hybrid plans: what any other plan has to beat.

Data parallelism is a pipeline of one stage. Its micro-batches do not fill a pipe but bound memory (gradient
accumulation), so the largest that fits is best: fewer of them make nothing slower.
"""

from __future__ import annotations

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.plan.hybrid_plan import HybridPlan, HybridStage
from fxpipe.ir.plan.layer_chain import Chain, scaled
from fxpipe.planning.stages.balance import StageCosts, balance

from .event_time import Problem, event_time, fits

PICOSECONDS = 1e12


def whole(problem: Problem) -> tuple[HybridStage, ...]:
    """One stage of all layers on all devices."""
    return (HybridStage(0, len(problem.chain), tuple(range(len(problem.cluster.devices)))),)


def data_parallel(problem: Problem) -> HybridPlan:
    """The plan of one stage. Raises PlanError where it does not fit in memory."""
    stages = whole(problem)
    if not fits(problem, stages):
        raise PlanError(
            f"{problem.chain.model} does not fit on each of the devices, with {problem.chain.batch:g} samples"
        )
    return HybridPlan(problem.chain.model, stages, problem.micro_batches, problem.warmup, problem.all_reduce)


def accumulated(
    chain: Chain, cluster: Cluster, batch: int, all_reduce: str = "end", copies: float = 2
) -> tuple[HybridPlan, float]:
    """Data parallelism over a batch, cut into as few micro-batches as memory allows, and the seconds of a step."""
    devices = len(cluster.devices)
    for m in range(1, max(1, batch // devices) + 1):
        if batch % m == 0:
            problem = Problem(scaled(chain, batch / m), cluster, m, all_reduce=all_reduce, copies=copies)
            if fits(problem, whole(problem)):
                return data_parallel(problem), event_time(problem, whole(problem))
    raise PlanError(f"not one sample of {chain.model} fits on a device")


def straight(problem: Problem) -> HybridPlan:
    """A device for each stage, on all devices, with the slowest stage as fast as can be. Raises PlanError where there
    are fewer layers than devices, or the plan does not fit in memory."""
    stages = one_each(problem)
    if not stages:
        raise PlanError(
            f"{problem.chain.model} has {len(problem.chain)} layers: "
            f"they cannot be cut into {len(problem.cluster.devices)} stages"
        )
    if not fits(problem, stages):
        raise PlanError(f"{problem.chain.model} does not fit in memory with a device for each stage")
    return HybridPlan(problem.chain.model, stages, problem.micro_batches, problem.warmup, problem.all_reduce)


def one_each(problem: Problem) -> tuple[HybridStage, ...]:
    """The stages of the plain pipeline; none where there are fewer layers than devices."""
    chain, n, k = problem.chain, len(problem.chain), len(problem.cluster.devices)
    if k > n:
        return ()
    work = [round((f + b) * PICOSECONDS) for f, b in zip(chain.forwards, chain.backwards, strict=True)]
    none = [0] * (n + 1)
    cuts = balance([StageCosts(work, none, none, none, none, 0)] * k, [range(1, n)] * (k - 1))
    if cuts is None:
        raise AssertionError("nothing bounds these cuts")
    return tuple(HybridStage(cuts[s], cuts[s + 1], (s,)) for s in range(k))
