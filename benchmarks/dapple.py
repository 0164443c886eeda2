"""The tables of the DAPPLE paper beside what fxpipe plans from the authors' profiles.

    python -m benchmarks.dapple

Table V is which plan is best for a model, a batch and a cluster of 16 GPUs, Table VII the best pipeline on cluster A.
The released planner's formula and constants decide, as they did for the paper; `benchmarks.dapple_released`
says which these are. Then DAPPLE's plans and PipeDream's of Table VII run through the event time, on cluster A at its
nominal 25 Gb/s. Two things there are not told and matter: how PipeDream's intervals are meant, which makes all the
difference for VGG-19, so both readings are shown; and where its "straight" plans are cut, which are given the best
balance there is.

With the late warm-up, PipeDream's straight plan for AmoebaNet-36 is the faster one (0.93). The parts of the steps say
why. DAPPLE cuts before state 30, where least crosses (5.6 MB): that leaves one half with 28% more work than an even
share. With the early warm-up, in which transfers are waited for, no cut on these devices is better by more than 0.2%,
and the straight plan loses 312 ms to its transfers. The late one hides almost all transfers, of both plans, and what is
left is the balance: on DAPPLE's own devices, the best cut is then before state 24, and beats the straight plan.

Table IV on cluster A has the paper's order but for GNMT-16. Its 8:8 has two micro-batches of 64 for each of 8
pipelines, and both warm-ups begin with two. If replicas share 16 micro-batches instead, as in table VII, its second
half takes so much longer than the first (153 and 93 ms) that 25 Gb/s of network are hidden anyway; at the 0.8 GB/s that
the authors measured, the late warm-up gains 1.32, as in the paper (1.31). The others then gain more than in the paper.

Last, what the paper's own planner, with its formula corrected, finds, by event time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from fxpipe.ir.cluster.published_clusters import dapple_a, dapple_c, preset
from fxpipe.ir.plan.hybrid_plan import WARMUPS as POLICIES
from fxpipe.ir.plan.hybrid_plan import HybridStage, cuts, shape
from fxpipe.ir.plan.layer_chain import Chain, scaled
from fxpipe.planning.hybrid.dapple import dapple
from fxpipe.planning.hybrid.event_time import Problem, event_time
from fxpipe.planning.hybrid.pipedream import Level, pipedream
from fxpipe.planning.hybrid.simple_plans import one_each, whole

from .dapple_profiles import read
from .dapple_released import (
    CONFIGURATIONS,
    Candidate,
    Job,
    best,
    candidates,
    data_parallel_time,
    hybrid_plan,
)
from .paper_data import MISSING, expected, folder, profile_path
from .tables import Row, show


@dataclass(frozen=True)
class Case:
    """A model of Table V: the authors' profile, the batch, and, from their example programs, the micro-batch, the peak
    of activations in bytes per sample and how often parameters are kept. `fits` is whether Table II lets one GPU of
    16 GB train it at all: AmoebaNet-36 needs 20 GB for one sample."""

    model: str
    profile: str
    batch: int
    micro_batch: int
    activations: float
    copies: float
    fits: bool = True


TABLE_V = (
    Case("ResNet-50", "resnet-50-analytic-pbs-128", 2048, 128, 70e6, 2),
    Case("VGG-19", "vgg-19-pbs-32", 2048, 32, 70e6, 2),
    Case("GNMT-16", "gnmt-16-pbs-64", 1024, 64, 100e6, 3),
    Case("BERT-48", "bert-48-pbs-2", 64, 1, 3.473e9, 3),
    Case("XLNet-36", "xlnet-36-pbs-1", 128, 1, 5.914e9, 3),
    Case("AmoebaNet-36", "amoeba-36-pbs-1", 128, 1, 0.376e9, 2, fits=False),
)

# The states of a profile that the paper's splits name, for the plans of Table V that are cut in two: "13:6" of VGG-19
# is before state 17 (13 convolutions, and 4 pools between them).
SPLITS = {
    ("VGG-19", "C"): 17,
    ("GNMT-16", "A"): 16,
    ("GNMT-16", "B"): 16,
    ("BERT-48", "A"): 29,
    ("XLNet-36", "A"): 22,
    ("XLNet-36", "B"): 22,
    ("AmoebaNet-36", "A"): 29,
    ("AmoebaNet-36", "B"): 32,
    ("AmoebaNet-36", "C"): 32,
}


@dataclass(frozen=True)
class Choice:
    """A cell of Table V: what the paper says, what we plan, where we cut and where the paper does (by state), the
    speed-up over one GPU, and the seconds that planning took."""

    model: str
    configuration: str
    paper: str
    ours: str
    split: int | None
    paper_split: int | None
    speedup: float
    seconds: float


def states(name: str) -> Chain:
    return read(profile_path(name), states=True)


def table_v() -> Iterator[Choice]:
    """All 18 cells."""
    for case, row in zip(TABLE_V, expected()["table_V"], strict=True):
        for configuration, machine in CONFIGURATIONS.items():
            job = Job(states(case.profile), machine, case.batch, case.micro_batch)
            told = row[configuration]
            paper = told if isinstance(told, str) else told["plan"]
            started = time.perf_counter()
            ours, split, latency = decide(case, job)
            seconds = time.perf_counter() - started
            at = SPLITS.get((case.model, configuration))
            yield Choice(case.model, configuration, paper, ours, split, at, job.times[-1] / latency, seconds)


def decide(case: Case, job: Job) -> tuple[str, int | None, float]:
    """The plan by the paper's rule: data parallelism where it fits and is faster than the best pipeline."""
    fastest = candidates(job)[0]
    parallel = data_parallel_time(job, case.activations, case.copies) if case.fits else float("inf")
    if parallel < fastest.latency:
        return "DP", None, parallel
    return named(job, fastest), fastest.stages[0].end if len(fastest.stages) == 2 else None, fastest.latency


def named(job: Job, candidate: Candidate) -> str:
    return shape(hybrid_plan(job, candidate).stages)


@dataclass(frozen=True)
class Contest:
    """A model of Table VII: the authors' profile, the micro-batch, and the inner cuts and replicas of PipeDream's plan,
    by state, if its intervals are half open, as the authors' program prints them: "(0,11)" ends before node 11, and
    node 0 is the input, so before state 10. None stands for "straight", cut evenly."""

    model: str
    profile: str
    micro_batch: int
    pipedream: tuple[tuple[int, ...], tuple[int, ...]] | None = None


# BERT-Large's nodes are of another profile of the authors, of 26 states: its cuts are carried over by layer.
TABLE_VII = (
    Contest("VGG-19", "vgg-19-pbs-32", 32, ((10, 16, 18), (8, 6, 1, 1))),
    Contest("AmoebaNet-36", "amoeba-36-pbs-1", 1),
    Contest("BERT-Large", "bert-24-pbs-6", 6, ((8, 17, 20, 23, 26), (2, 6, 2, 2, 2, 2))),
    Contest("XLNet-36", "xlnet-36-pbs-1", 1),
)


@dataclass(frozen=True)
class Result:
    """Of a contest: DAPPLE's plan as we find it, where it is cut and where the paper says, and event times in seconds:
    of DAPPLE's plan, of PipeDream's as published, of the same with intervals read as closed, and of what our PipeDream
    plans."""

    model: str
    plan: str
    split: int
    paper_split: int
    dapple: float
    published: float
    closed: float
    ours: float


def table_vii(warmup: str) -> Iterator[Result]:
    """The four contests on cluster A, with micro-batches of the profile's size shared by all replicas."""
    for contest, row in zip(TABLE_VII, expected()["table_VII"], strict=True):
        problem, stages = problem_of(contest, row["gbs"], warmup)
        theirs = problem_plans(contest, problem)
        ours = pipedream(problem.chain, [Level(8, 130e9), Level(2, 3.125e9)])
        times = [event_time(problem, one) for one in (stages, *theirs, ours)]
        told = int(str(row["authors_state_split"]).split()[0])
        yield Result(contest.model, shape(stages), stages[0].end, told, *times)


def problem_of(contest: Contest, batch: int, warmup: str) -> tuple[Problem, tuple[HybridStage, ...]]:
    """The step of a contest, and DAPPLE's plan for it."""
    chain = states(contest.profile)
    job = Job(chain, CONFIGURATIONS["A"], batch, contest.micro_batch)
    m = batch // contest.micro_batch
    problem = Problem(scaled(chain, batch / m), dapple_a(), m, warmup, capped=False)
    return problem, hybrid_plan(job, best(job)).stages


def problem_plans(contest: Contest, problem: Problem) -> tuple[tuple[HybridStage, ...], ...]:
    """PipeDream's plan, with its intervals read as half open and as closed."""
    if contest.pipedream is None:
        return one_each(problem), one_each(problem)
    inner, replicas = contest.pipedream
    return line(inner, replicas, problem), line([cut + 1 for cut in inner], replicas, problem)


def line(inner: Sequence[int], replicas: Sequence[int], problem: Problem) -> tuple[HybridStage, ...]:
    """Stages on neighbouring devices."""
    layers, devices = (0, *inner, len(problem.chain)), accumulate(replicas, initial=0)
    spans = zip(pairwise(layers), pairwise(devices), strict=True)
    return tuple(HybridStage(a, b, tuple(range(x, y))) for (a, b), (x, y) in spans)


def step_parts(warmup: str, model: str) -> Iterator[Row]:
    """What the steps of a contest consist of, in ms: of DAPPLE's plan, of the same devices with the best cut for this
    warm-up, and of PipeDream's plan."""
    contest, row = next(
        (one, row) for one, row in zip(TABLE_VII, expected()["table_VII"], strict=True) if one.model == model
    )
    problem, stages = problem_of(contest, row["gbs"], warmup)
    first, second = stages
    cuts = range(1, len(problem.chain))
    every = ((replace(first, end=cut), replace(second, first=cut)) for cut in cuts)
    best_cut = min(every, key=lambda one: event_time(problem, one))
    plans = {"DAPPLE": stages, "DAPPLE, best cut": best_cut, "PipeDream": problem_plans(contest, problem)[0]}
    for name, plan in plans.items():
        cut = plan[0].end if len(plan) == 2 else None
        yield name, warmup, shape(plan), cut, *(1e3 * seconds for seconds in parts(problem, plan))


def parts(problem: Problem, stages: Sequence[HybridStage]) -> tuple[float, ...]:
    """The seconds of a step if all work were shared evenly; what the slowest stage adds; what filling and emptying the
    pipe adds; what transfers and the all-reduce add; and their sum, the step."""
    chain, m = problem.chain, problem.micro_batches
    costs = [problem.stage(stage.first, stage.end, stage.devices) for stage in stages]
    even = m * (chain.forwards[-1] + chain.backwards[-1]) / sum(len(stage.devices) for stage in stages)
    slowest = m * max(cost.forward + cost.backward for cost in costs)
    alone = replace(chain, layers=tuple(replace(layer, parameters=0, cut=0) for layer in chain.layers))
    free, step = event_time(replace(problem, chain=alone), stages), event_time(problem, stages)
    return even, slowest - even, free - slowest, step - free, step


# Table IV: DAPPLE's later warm-up over its earlier. The paper does not say on which plans; these are the best pipelines
# of Table V's planner, and for GNMT-16 the straight one of C too.
WARMUPS = (("BERT-48", "A"), ("XLNet-36", "A"), ("VGG-19", "A"), ("GNMT-16", "A"), ("GNMT-16", "C"))
# The clusters with what the authors measured between two servers.
MEASURED = {"A": dapple_a(0.8e9), "C": dapple_c(0.32e9)}


def table_iv() -> Iterator[tuple[str, str, str, int, float, float, float, float]]:
    """Model, configuration, plan, its number of micro-batches, the paper's gain and ours; and ours if all replicas
    share micro-batches as large as the profile's, with the nominal network and with the measured one."""
    told = expected()["table_IV_PB_over_PA"]
    by_model = {case.model: case for case in TABLE_V}
    for model, configuration in WARMUPS:
        case = by_model[model]
        job = Job(states(case.profile), CONFIGURATIONS[configuration], case.batch, case.micro_batch)
        found = next(one for one in candidates(job) if len(one.stages) > 1)
        plan = hybrid_plan(job, found)
        shared = round(case.batch / job.chain.batch)
        settings = ((plan.micro_batches, preset(configuration)), (shared, preset(configuration)))
        settings += ((shared, MEASURED[configuration]),)
        gains = []
        for m, cluster in settings:
            early = Problem(scaled(job.chain, case.batch / m), cluster, m, "early", capped=False)
            gains.append(event_time(early, plan.stages) / event_time(replace(early, warmup="late"), plan.stages))
        yield model, configuration, named(job, found), plan.micro_batches, told[model], gains[0], gains[1], gains[2]


def planners() -> Iterator[tuple[str, str, str, float, float, float]]:
    """Model, configuration, the plan of DAPPLE's published planner, and event times: data parallel, that plan's, and
    the seconds that planning took. Micro-batches are of the profile's size; memory is not looked at."""
    for case in TABLE_V[1:]:
        chain = read(profile_path(case.profile))
        for configuration in ("B", "C"):
            m = case.batch // int(chain.batch)
            problem = Problem(chain, preset(configuration), m, "late", capped=False)
            started = time.perf_counter()
            plan = dapple(problem)
            seconds = time.perf_counter() - started
            text = f"{shape(plan.stages)} @ {', '.join(map(str, cuts(plan.stages)))}"
            parallel = event_time(problem, whole(problem))
            yield case.model, configuration, text, parallel, event_time(problem, plan.stages), seconds


def main() -> None:
    if folder() is None:
        print(MISSING)
        return
    heads: tuple[str, ...] = ("model", "cluster", "paper", "ours", "paper's cut", "our cut", "speed-up", "planned in s")
    rows = show(
        "Table V: the best plan, and the state before which a plan of two stages is cut", heads, map(_cells, table_v())
    )
    print(f"{sum(row[2] == row[3] for row in rows)} of {len(rows)} plans as in the paper\n")

    heads = ("model", "warm-up", "plan", "paper's cut", "our cut", "DAPPLE", "PipeDream")
    heads += ("intervals closed", "our PipeDream", "faster")
    title = "Table VII on cluster A: DAPPLE's plan, and event times of it and of PipeDream's in ms"
    show(title, heads, (_times(one, warmup) for warmup in POLICIES for one in table_vii(warmup)))

    heads = ("plan of", "warm-up", "plan", "cut", "even work", "imbalance", "filling", "transfers, all-reduce", "step")
    rows_of = (row for warmup in POLICIES for row in step_parts(warmup, "AmoebaNet-36"))
    show("Table VII, AmoebaNet-36: what the steps consist of, in ms", heads, rows_of)

    heads = ("model", "cluster", "plan", "M", "paper", "ours", "shared", "shared, measured network")
    show("Table IV: throughput of the late warm-up over the early", heads, table_iv())

    found = ((model, where, text, 1e3 * a, 1e3 * b, s) for model, where, text, a, b, s in planners())
    title = "DAPPLE's planner as published, with its formula corrected, by event time in ms"
    show(title, ("model", "cluster", "plan", "data parallel", "DAPPLE", "planned in s"), found)


def _cells(row: Choice) -> Row:
    choice = (row.model, row.configuration, row.paper, row.ours)
    return *choice, row.paper_split, row.split, row.speedup, row.seconds


def _times(one: Result, warmup: str) -> Row:
    times = [1e3 * seconds for seconds in (one.dapple, one.published, one.closed, one.ours)]
    return one.model, warmup, one.plan, one.paper_split, one.split, *times, one.published / one.dapple


if __name__ == "__main__":
    main()
