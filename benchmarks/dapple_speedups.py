"""Figures 12, 13 and 14 of the DAPPLE paper by simulation: speed-ups over one device, by event time.

    python -m benchmarks.dapple_speedups                            some minutes
    python -m benchmarks.dapple_speedups --figures 14 --models VGG-19

    figure 12   data parallelism, its all-reduce at the end or overlapped with the last backward, and hybrid plans, by
                cluster and batch
    figure 13   PipeDream's plans and DAPPLE's on 2 and on 4 servers of 8
    figure 14   as figure 12, for one batch on 2 to 16 devices: strong scaling

"DAPPLE" is the planner of its paper; "ours" is the faster of its plan and of what the planner `optimal` finds in two
seconds. Hybrid plans have micro-batches of the profile's size and the late warm-up; data parallelism has the largest
micro-batches that fit, so that overlap hides most. Memory is what the authors count for data parallelism, and left out
for hybrid plans, as in the released planner. Networks are nominal.

The bars of these figures are pictures, and no numbers of them are at hand. What the paper tells in numbers stands
beside ours: its choice in table V for 16 devices and the whole batch, and for figure 13 "up to 3.23 times" (its
abstract). Between data parallelism and hybrid plans, our choice is the paper's for all models and clusters. Shapes
differ where event time knows a faster plan: the paper's 8:8 is one of two halves, and has what its formula finds.
VGG-19 gains more than 3.23 in PipeDream's reading of half open intervals, see `benchmarks.dapple`; AmoebaNet-36 on
two servers loses for the reason that is told there, and has a faster plan, too. On four servers DAPPLE's own search
takes minutes for all models but VGG-19: it is broken off, and says nothing of the plan that it would have found.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.published_clusters import GBIT, NVLINK_LATENCY, V100, preset, servers
from fxpipe.ir.plan.hybrid_plan import shape
from fxpipe.ir.plan.layer_chain import Chain, scaled
from fxpipe.planning.hybrid.dapple import DappleSearch
from fxpipe.planning.hybrid.event_time import Problem, event_time
from fxpipe.planning.hybrid.plan_request import Answer, Request
from fxpipe.planning.hybrid.planners import search
from fxpipe.planning.hybrid.simple_plans import whole

from .dapple import TABLE_V, TABLE_VII, Case, problem_of, problem_plans
from .dapple_profiles import read
from .paper_data import MISSING, expected, folder, profile_path
from .planning import sensible
from .tables import Row, show

MEMORY = 16e9  # bytes of a V100
SECONDS = 2.0  # for a plan
DAPPLE = 5  # times as long for DAPPLE's own search on many devices, which would take minutes
MODELS = tuple(case.model for case in TABLE_V[1:])  # ResNet-50's profile is no measured one


def profile(name: str) -> Chain:
    return sensible(read(profile_path(name), states=True))


def one_device(chain: Chain, batch: int) -> float:
    """The seconds of a step on one device, if it had the memory."""
    return (chain.forwards[-1] + chain.backwards[-1]) * batch / chain.batch


def data_parallel(case: Case, chain: Chain, cluster: Cluster, batch: int, all_reduce: str) -> float | None:
    """The seconds of a data parallel step with the largest micro-batches that fit; None if not one sample does."""
    room = int((MEMORY - case.copies * chain.parameters[-1]) / case.activations) if case.fits else 0
    if room < 1:
        return None
    devices = len(cluster.devices)
    m = -(-batch // (room * devices))
    problem = Problem(scaled(chain, batch / m), cluster, m, all_reduce=all_reduce, capped=False)
    return event_time(problem, whole(problem))


def hybrid(planner: str, chain: Chain, cluster: Cluster, batch: int, seconds: float) -> Answer:
    """The plan of a planner, with micro-batches of the profile's size."""
    m = max(1, round(batch / chain.batch))
    return search(planner, Request((chain,), cluster, batch, m, "late", copies=2, seconds=seconds, capped=False))


HEADS = ("model", "cluster", "devices", "batch", "data par.", "overlapped", "DAPPLE", "plan", "ours", "plan")
HEADS += ("paper's choice", "our choice")


def compared(case: Case, where: str, cluster: Cluster, batch: int, seconds: float) -> Row:
    """Speed-ups over one device of data parallelism and of hybrid plans."""
    chain = profile(case.profile)
    alone, devices = one_device(chain, batch), len(cluster.devices)
    parallel = [data_parallel(case, chain, cluster, batch, when) for when in ("end", "overlap")]
    dapple, found = (hybrid(planner, chain, cluster, batch, seconds) for planner in ("dapple", "optimal"))
    ours = min(dapple, found, key=lambda answer: answer.seconds)
    fastest = min([time for time in parallel if time is not None], default=float("inf"))
    choice = "DP" if fastest <= ours.seconds else shape(ours.plan.stages)
    told = paper_choice(case.model, where) if devices == 16 and batch == case.batch else None
    return (
        case.model,
        where,
        devices,
        batch,
        *(None if time is None else alone / time for time in parallel),
        *(cell for one in (dapple, ours) for cell in (alone / one.seconds, shape(one.plan.stages))),
        told or "",
        choice,
    )


def paper_choice(model: str, where: str) -> str:
    """Table V's plan."""
    told = next(row for row in expected()["table_V"] if row["model"] == model)[where]
    return told if isinstance(told, str) else str(told["plan"])


def figure_12(models: Sequence[str], parts: Sequence[int], seconds: float) -> Iterator[Row]:
    """Each model on each cluster, for each of these parts of table V's batch."""
    for case in chosen(models):
        for where in ("A", "B", "C"):
            for part in parts:
                yield compared(case, where, preset(where), case.batch // part, seconds)


def figure_14(models: Sequence[str], devices: Sequence[int], seconds: float) -> Iterator[Row]:
    """Each model with table V's batch on so many devices of cluster A."""
    for case in chosen(models):
        for count in devices:
            yield compared(case, "A", preset(f"A:{count}"), case.batch, seconds)


def chosen(models: Sequence[str]) -> Iterator[Case]:
    return (case for case in TABLE_V if case.model in models)


HEADS_13 = (
    "model",
    "servers",
    "batch",
    "PipeDream",
    "plan",
    "DAPPLE",
    "plan",
    "ours",
    "plan",
    "faster",
    "DAPPLE's search",
    "paper",
)


def figure_13(counts: Sequence[int], seconds: float) -> Iterator[Row]:
    """The contests of table VII. On two servers both plans are the published ones; on more, those of the planners,
    DAPPLE's with the best that it has found by then if it is broken off."""
    for contest, row in zip(TABLE_VII, expected()["table_VII"], strict=True):
        chain, batch = profile(contest.profile), row["gbs"]
        m = batch // contest.micro_batch
        alone = one_device(chain, batch)
        for count in counts:
            cluster = servers(count, 8, V100, 130e9, 25 * GBIT, NVLINK_LATENCY)
            task = Request((scaled(chain, batch / m),), cluster, batch, m, "late", copies=2, seconds=seconds)
            task = replace(task, capped=False)
            ended = True
            if count == 2:
                problem, plan = problem_of(contest, batch, "late")
                published = [(event_time(problem, one), one) for one in (problem_plans(contest, problem)[0], plan)]
            else:
                problem = task.problem(m, "late")
                theirs = search("pipedream", task)
                dapple = DappleSearch(problem)
                ended = dapple.run(perf_counter() + DAPPLE * seconds)
                published = [(theirs.seconds, theirs.plan.stages), (event_time(problem, dapple.stages), dapple.stages)]
            best = search("optimal", task)
            plans = [*published, min(published[1], (best.seconds, best.plan.stages))]
            cells = (cell for time, stages in plans for cell in (alone / time, shape(stages)))
            faster = plans[0][0] / plans[1][0] if ended else None
            yield contest.model, f"{count} x 8", batch, *cells, faster, "" if ended else "broken off", "at most 3.23"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", nargs="+", type=int, choices=(12, 13, 14), default=[12, 13, 14])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="of figures 12 and 14")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each plan of ours")
    given = parser.parse_args()
    if folder() is None:
        print(MISSING)
        return
    if 12 in given.figures:
        title = "Figure 12: data parallelism and hybrid plans on 16 devices, speed-up over one"
        show(title, HEADS, figure_12(given.models, (4, 1), given.seconds))
    if 13 in given.figures:
        show("Figure 13: PipeDream's plans and DAPPLE's, speed-up over one device", HEADS_13,
             figure_13((2, 4), given.seconds))  # fmt: skip
    if 14 in given.figures:
        title = "Figure 14: strong scaling on cluster A, speed-up over one device"
        show(title, HEADS, figure_14(given.models, (2, 4, 8, 16), given.seconds))


if __name__ == "__main__":
    main()
