"""The plan with the least event time, and how sure that is.

What is searched: every cut of the chain into stages, every number of replicas for each, every placement on the cluster,
and, where they are not given, the number of micro-batches, the warm-up, and which stages recompute to fit in memory.

    1. seeds     data parallel, plain pipelines, the plans given, and those that the bounds come with
    2. improve   the best of them, by small changes (improve.py)
    3. refute    "nothing takes less than t" for a t between the bound and the best plan (bounds.py, refute.py): either
                 that is so, and t is the new bound, or a faster plan turns up. Once t is the best plan's own time, that
                 plan is proven to be optimal. A t that takes too long is lowered half-way to the bound.

DAPPLE's own plan joins in where 3 does not end at once. Where placements are too many to go through, as on eight
servers of four, 3 goes through those in the order of the devices, and proves nothing; where devices are too many for
tables, as a thousand are, it is left out, and the bound is that of dual.py. The bound is a bound whenever the search
ends. Costs of layers are taken to grow with the samples in a micro-batch: see `fxpipe.ir.plan.layer_chain.scaled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter

from fxpipe.errors import PlanError
from fxpipe.ir.cluster import cluster as clusters
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.plan import hybrid_plan as hybrid
from fxpipe.ir.plan import layer_chain as chains
from fxpipe.ir.plan.hybrid_plan import HybridPlan
from fxpipe.ir.plan.layer_chain import Chain
from fxpipe.ir.units import show_bytes, show_seconds
from fxpipe.planning.hybrid.event_time import Problem

from .search_phases import EXACT, PlanSearch, Task, ask_dapple, case_of, close_in, polish, prove, seed

MOST_MICRO_BATCHES = 256  # where the search is free to choose: more cost time to simulate, and gain next to nothing


@dataclass(frozen=True)
class Certificate:
    """No plan takes less than `bound` seconds. How many plans were simulated, how many branches of the search were
    taken, and the seconds it all took."""

    bound: float
    gap: float
    simulated: int
    branches: int
    seconds: float

    @property
    def proven(self) -> bool:
        """Whether the plan is optimal."""
        return self.gap <= EXACT

    def __str__(self) -> str:
        known = "proven optimal" if self.proven else f"at most {self.gap:.2%} above the optimum"
        return (
            f"{known}: no plan takes less than {show_seconds(self.bound)} "
            f"({self.simulated} plans simulated, {self.branches} branches, {show_seconds(self.seconds)})"
        )


@dataclass(frozen=True)
class Optimum:
    """A plan, the seconds of its step, what it was for, and how good it is."""

    plan: HybridPlan
    time: float
    problem: Problem
    certificate: Certificate

    def __str__(self) -> str:
        return f"{self.plan}\n\n{show_seconds(self.time)} per step, {self.certificate}"


def optimal(
    chain: Chain,
    cluster: Cluster,
    batch: float,
    *,
    micro_batches: int | Sequence[int] | None = None,
    warmup: str | None = None,
    recompute: bool | None = None,
    all_reduce: str = "end",
    copies: float = 2,
    capped: bool = True,
    seconds: float = 30,
    seeds: Sequence[HybridPlan] = (),
) -> Optimum:
    """The fastest plan for a step of `batch` samples that fits in memory, found within about so many `seconds`.

    `micro_batches` is a number or some to choose from; if not given, all that divide `batch`, up to 256. `recompute` is
    whether all stages do, none (False), or those that have to (None). `all_reduce`, `copies` and `capped` are those of
    a `Problem`. The answer is at least as fast as each of the `seeds` that is for the same choice and fits.

    Raises PlanError if the chain, the cluster or a choice is none, or if no plan fits in memory.
    """
    started = perf_counter()
    _check(chain, cluster, batch, micro_batches, warmup, all_reduce, seconds)
    for plan in seeds:
        try:
            hybrid.check(plan, len(chain), len(cluster.devices))
        except ValueError as error:
            raise PlanError(f"a seed is not a plan for this: {error}") from None
    task = Task(chain, cluster, batch, recompute, all_reduce, copies, capped, started + seconds)
    counts = _counts(batch, micro_batches)
    warmups = hybrid.WARMUPS if warmup is None else (warmup,)
    cases = [case_of(task, m, how) for m in counts for how in warmups]
    hunt = PlanSearch(cases, task.until)
    seed(hunt, seeds)
    close_in(hunt)
    polish(hunt)
    now = perf_counter()
    prove(hunt, now + (task.until - now) / 3)
    ask_dapple(hunt)
    prove(hunt, task.until)
    if hunt.case is None:
        raise PlanError(_too_large(chain, cluster, copies))
    case, bound = hunt.case, min(hunt.time, min(case.bound for case in cases))
    problem = case.problem
    stages = case.shapes.stages(hunt.shape)
    plan = HybridPlan(chain.model, stages, problem.micro_batches, problem.warmup, all_reduce)
    certificate = Certificate(
        bound,
        1 - bound / hunt.time if hunt.time else 0.0,
        sum(case.shapes.simulated for case in cases),
        hunt.branches,
        perf_counter() - started,
    )
    return Optimum(plan, hunt.time, problem, certificate)


# At the door --------------------------------------------------------------------------------------------------------


def _check(
    chain: Chain,
    cluster: Cluster,
    batch: float,
    micro_batches: int | Sequence[int] | None,
    warmup: str | None,
    all_reduce: str,
    seconds: float,
) -> None:
    try:
        chains.check(chain)
        clusters.check(cluster)
    except ValueError as error:
        raise PlanError(f"cannot plan: {error}") from None
    if not 0 < batch < inf:
        raise PlanError(f"a step of {batch} samples; it has some")
    for count in _counts(batch, micro_batches):
        if count < 1 or count != int(count):
            raise PlanError(f"{count} micro-batches; give whole numbers, at least 1")
    if warmup not in (None, *hybrid.WARMUPS):
        raise PlanError(f"there is no warm-up {warmup!r}; there are {', '.join(hybrid.WARMUPS)}")
    if all_reduce not in hybrid.ALL_REDUCES:
        raise PlanError(f"there is no all-reduce {all_reduce!r}; there are {', '.join(hybrid.ALL_REDUCES)}")
    if not seconds > 0:
        raise PlanError(f"{seconds} seconds to search; give more than none")


def _counts(batch: float, micro_batches: int | Sequence[int] | None) -> list[int]:
    if isinstance(micro_batches, int):
        return [micro_batches]
    if micro_batches is not None:
        if not micro_batches:
            raise PlanError("no number of micro-batches to choose from")
        return list(dict.fromkeys(micro_batches))
    if batch != int(batch):
        raise PlanError(f"a step of {batch:g} samples cannot be divided evenly: say how many micro-batches")
    return [m for m in range(1, min(int(batch), MOST_MICRO_BATCHES) + 1) if int(batch) % m == 0]


def _too_large(chain: Chain, cluster: Cluster, copies: float) -> str:
    memory = max(device.memory for device in cluster.devices)
    held = [copies * layer.parameters for layer in chain.layers]
    largest = max(range(len(held)), key=held.__getitem__)
    return (
        f"no plan found that fits in memory: the parameters of {chain.model} take {show_bytes(sum(held))} with their "
        f"gradients, layer {chain.layers[largest].name!r} alone {show_bytes(held[largest])}, and the largest of "
        f"{len(cluster.devices)} devices has {show_bytes(memory)}; allow recompute, smaller micro-batches or a larger "
        "cluster"
    )
