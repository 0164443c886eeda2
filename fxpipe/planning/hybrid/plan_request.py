"""The request to a planner of whole clusters, and its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxpipe.errors import PlanError
from fxpipe.ir.cluster import cluster as clusters
from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.plan import layer_chain as chains
from fxpipe.ir.plan.hybrid_plan import ALL_REDUCES, WARMUPS, HybridPlan
from fxpipe.ir.plan.layer_chain import Chain
from fxpipe.ir.plan.model_states import OPTIMIZER_SHARDINGS, ZERO
from fxpipe.ir.units import count, show_seconds

from .event_time import Problem, least_work_of

MOST_MICRO_BATCHES = 1024  # if the planner chooses: more take time to simulate, and gain very little
FEW = 4  # numbers of micro-batches that a slow planner tries
ASKED_SHARDINGS = (*OPTIMIZER_SHARDINGS, "auto")
EXACT = 1e-9  # a plan this little above the bound, relatively, is as good as optimal: sums have rounding errors


@dataclass(frozen=True)
class RequestWay:
    """A way of stages to cut their ops over groups of devices.

    - `degree`: the devices of a group.
    - `chains`: what layers cost on each device of a group, as in `Request`.
    - `cluster`: the cluster of groups.
    """

    degree: int
    chains: tuple[Chain, ...]
    cluster: Cluster


@dataclass(frozen=True)
class Request:
    """What plans are for: steps of `batch` samples on a `cluster`. The planner chooses what is None.

    - `chains`: the same layers with costs at several sizes of micro-batch; other sizes are scaled from the nearest
    - `micro_batches`, `warmup`: those of the plan
    - `recompute`: whether all stages do (True), none (False), or those that do not fit in memory otherwise (None)
    - `all_reduce`, `copies`, `capped`: as in `Problem`
    - `optimizer_sharding`: that of all plans; or "auto": that of the fastest plan, and of equally fast ones the least
    - `most_sharding`: the most that "auto" stands for: "zero1" where nothing runs plans with "zero3"
    - `seconds`: how long a search may take
    - `ways`: the ways of which each stage has one; if not given, all have single devices, with the costs of `chains`.
      Only "optimal" knows several. The size of each group divides the next larger one
    - `known`: plans on the cluster's devices to begin with
    """

    chains: tuple[Chain, ...]
    cluster: Cluster
    batch: int
    micro_batches: int | None = None
    warmup: str | None = None
    recompute: bool | None = None
    all_reduce: str = "end"
    copies: float = 4
    seconds: float = 30
    capped: bool = True
    optimizer_sharding: str = "none"
    most_sharding: str = "zero3"
    ways: tuple[RequestWay, ...] = ()
    known: tuple[HybridPlan, ...] = ()

    @property
    def every(self) -> tuple[RequestWay, ...]:
        """All ways: at least one."""
        return self.ways or (RequestWay(1, self.chains, self.cluster),)

    @property
    def shardings(self) -> tuple[str, ...]:
        """What plans may shard, the least first."""
        if self.optimizer_sharding != "auto":
            return (self.optimizer_sharding,)
        return OPTIMIZER_SHARDINGS[: OPTIMIZER_SHARDINGS.index(self.most_sharding) + 1]

    @property
    def searches(self) -> tuple[Request, ...]:
        """What to search: with "auto" plans with and without ZeRO-1, which takes no time, and besides plans with
        ZeRO-3, which takes time, unless all that there is fits on each device."""
        if self.optimizer_sharding != "auto" or "zero3" not in self.shardings or self._roomy():
            return (self,)
        return self, replace(self, optimizer_sharding="zero3")

    def _roomy(self) -> bool:
        """Whether even a device with the whole model and all micro-batches would have enough memory."""
        each = [(m, chains.for_micro_batches(self.chains, self.batch, m)) for m in self.counts()]
        waiting = max(m * (chain.saved[-1] + sum(chain.cuts)) for m, chain in each)
        held = self.copies * self.chains[0].parameters[-1] + waiting
        return not self.capped or held <= min(device.memory for device in self.cluster.devices)

    @property
    def warmups(self) -> tuple[str, ...]:
        """The warm-ups to try."""
        return WARMUPS if self.warmup is None else (self.warmup,)

    def counts(self, most: int | None = None) -> list[int]:
        """The numbers of micro-batches to try: the one asked for, or those that divide the batch; if these are more
        than `most`, the ones nearest to four for each device. If not given, there are as many as sizes at which costs
        are known, but at least those that slow planners try; and all if costs are known at one size and scaled.
        Of several ways those of each way, whose devices are groups."""
        if self.micro_batches is not None:
            return [self.micro_batches]
        if self.ways:
            alone = (replace(self, chains=way.chains, cluster=way.cluster, ways=()) for way in self.ways)
            return sorted({m for one in alone for m in one.counts(most)})
        if most is None:
            most = max(len(self.chains), FEW) if len(self.chains) > 1 else MOST_MICRO_BATCHES
        every = [m for m in range(1, min(self.batch, MOST_MICRO_BATCHES) + 1) if self.batch % m == 0]
        wanted = 4 * len(self.cluster.devices)
        return sorted(sorted(every, key=lambda m: max(m / wanted, wanted / m))[:most])

    def problems(self, micro_batches: int, warmup: str) -> tuple[Problem, ...]:
        """The problem of each way."""
        alone = (replace(self, chains=way.chains, cluster=way.cluster, ways=()) for way in self.every)
        return tuple(one.problem(micro_batches, warmup) for one in alone)

    def problem(self, micro_batches: int, warmup: str) -> Problem:
        chain = chains.for_micro_batches(self.chains, self.batch, micro_batches)
        return Problem(
            chain,
            self.cluster,
            micro_batches,
            warmup,
            self.all_reduce,
            self.copies,
            self.capped,
            self.optimizer_sharding,
        )


def check(request: Request) -> None:
    """Raise PlanError if no plan can be made for the request."""
    try:
        for chain in request.chains:
            chains.check(chain)
            if chain.ideal_shares != request.chains[0].ideal_shares:
                raise ValueError(f"some chains of {chain.model} have ideal shares, and some have not")
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
    if request.all_reduce not in ALL_REDUCES:
        raise PlanError(f"there is no all-reduce {request.all_reduce!r}; there are {', '.join(ALL_REDUCES)}")
    if request.optimizer_sharding not in ASKED_SHARDINGS:
        raise PlanError(
            f"there is no optimizer sharding {request.optimizer_sharding!r}; there are {', '.join(ASKED_SHARDINGS)}"
        )
    if request.optimizer_sharding == "zero3" != request.most_sharding:
        raise PlanError(
            "with optimizer_sharding='zero3' each backward is one action, on whole parameters that replicas gather: "
            "leave out tensor_parallel, and schedules that split backward, such as 'zb-h1', or write "
            "optimizer_sharding='zero1'"
        )
    if not request.seconds > 0:
        raise PlanError(f"{request.seconds} seconds to search; give more than none")


def work_bound(request: Request) -> float:
    """Seconds that no plan takes less than, whatever the order of its actions: all of the model's work, shared by all
    devices without a loss."""
    devices, degrees = len(request.cluster.devices), [way.degree for way in request.every]
    return min(least_work_of(request.problems(m, "early"), degrees, devices) for m in request.counts())


@dataclass(frozen=True)
class Certificate:
    """What a search knows of its plan.

    - `bound`: no plan takes fewer seconds.
    - `gap`: by what share of the plan's time the bound is below it.
    - `simulated`: how many plans were simulated.
    - `branches`: how many branches were searched.
    - `seconds`: how long the search took.
    - `ways`: the tensor-parallel sizes of which each stage may have its own, each as often as there are ways to cut ops
      for it; empty if all stages have the same.
    - `ideal_shares`: whether the replicas of all plans share micro-batches evenly, whole samples or not.
    - `unfinished`: for how many numbers of micro-batches and warm-ups DAPPLE's planner took too long. Its plan with one
      of these may be faster; with all others it is not.
    - `optimizer_sharding`: that of all plans: "none", "zero1", "zero3", or "auto", where memory asks for it;
      then at most `most_sharding`.
    """

    bound: float
    gap: float
    simulated: int
    branches: int
    seconds: float
    ideal_shares: bool = False
    unfinished: int = 0
    optimizer_sharding: str = "none"
    ways: tuple[int, ...] = ()
    most_sharding: str = "zero3"

    @property
    def proven(self) -> bool:
        """Whether the plan is optimal."""
        return self.gap <= EXACT

    @property
    def proof(self) -> str:
        """What is proven, in a line."""
        known = "proven optimal" if self.proven else f"at most {self.gap:.2%} above the optimum"
        if self.ideal_shares:
            known += ", with ideal shares"
        if self.optimizer_sharding != "none":
            auto = "ZeRO-1" + " or ZeRO-3" * (self.most_sharding == "zero3") + " where memory asks for it"
            known += f", with {ZERO.get(self.optimizer_sharding, auto)}"
        if self.ways:
            cuts = ((size, self.ways.count(size)) for size in dict.fromkeys(self.ways))
            sizes = (f"{size} ({number} ways to cut ops)" if number > 1 else str(size) for size, number in cuts)
            known += f", with a tensor-parallel size of {', '.join(sizes)} for each stage"
        if self.unfinished:
            known += (
                f", and perhaps above DAPPLE's plan, whose planner did not end in time ({self.unfinished} searches)"
            )
        return f"{known}: no plan takes less than {show_seconds(self.bound)}"

    @property
    def effort(self) -> str:
        """What the search took."""
        made = f"{count(self.simulated, 'plan', 'plans')} simulated, {count(self.branches, 'branch', 'branches')}"
        return f"{made}, {show_seconds(self.seconds)}"

    def __str__(self) -> str:
        return f"{self.proof} ({self.effort})"


@dataclass(frozen=True)
class Answer:
    """A plan, the seconds of its step by event time, and a certificate, if the planner gives one. `unfinished`: how
    many searches of DAPPLE's planner did not end in time."""

    plan: HybridPlan
    seconds: float
    certificate: Certificate | None = None
    unfinished: int = 0
