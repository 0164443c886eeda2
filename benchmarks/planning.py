"""The optimal plan for each of DAPPLE's profiles, how sure it is, and what other planners make of the same problem.

    python -m benchmarks.planning [--seconds 60] [--model GNMT-16]

16 GPUs in servers of their own, 25 Gb/s (B) or 10 Gb/s (C) between them; micro-batches as the authors profiled them,
late warm-up, all-reduce at the end, memory left out, layers as the authors linearise them. All plans are timed by the
same event time. "paper" is the planner of DAPPLE's paper, "released" the program of its authors; "known" is the best
plan that long annealing runs had found before.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from tabulate import tabulate
from tqdm import tqdm

from fxpipe.ir.cluster.published_clusters import GBIT, V100, servers
from fxpipe.ir.plan.hybrid_plan import HybridStage, cuts, shape
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.planning.hybrid.dapple import dapple
from fxpipe.planning.hybrid.event_time import Problem, event_time
from fxpipe.planning.hybrid.exact.optimal_plan import optimal
from fxpipe.planning.hybrid.plan_request import Answer, Request

from .dapple import TABLE_V, Case
from .dapple_profiles import read
from .dapple_released import CONFIGURATIONS, Job, best, hybrid_plan
from .paper_data import profile_path

BETWEEN = {"B": 25 * GBIT, "C": 10 * GBIT}

# Milliseconds of the best plan that was known, by model and cluster.
KNOWN = {
    ("VGG-19", "B"): 629.5,
    ("VGG-19", "C"): 716.0,
    ("GNMT-16", "B"): 414.6,
    ("GNMT-16", "C"): 589.1,
    ("BERT-48", "B"): 962.6,
    ("BERT-48", "C"): 1132.9,
    ("XLNet-36", "B"): 2725.0,
    ("XLNet-36", "C"): 3059.1,
    ("AmoebaNet-36", "B"): 1710.3,
    ("AmoebaNet-36", "C"): 1998.0,
}

ROUNDING = 1e-12  # what is left of two running sums that are equal

HEAD = (
    "model",
    "cluster",
    "ours ms",
    "known",
    "paper",
    "released",
    "bound",
    "gap",
    "seconds",
    "branches",
    "plan",
    "cut at",
)


def problem(case: Case, cluster: str) -> Problem:
    """What all planners plan for."""
    chain = sensible(read(profile_path(case.profile), states=True))
    machine = servers(16, 1, V100, 1.0, BETWEEN[cluster])
    return Problem(chain, machine, round(case.batch / chain.batch), "late", "end", capped=False)


def sensible(chain: Chain) -> Chain:
    """The states of a profile as layers that can be: one that takes less than nothing is part of the one before."""
    layers: list[Layer] = []
    for layer in chain.layers:
        layers.append(layer)
        while len(layers) > 1 and min(layers[-1].forward, layers[-1].backward, layers[-1].parameters) < -ROUNDING:
            layers[-2:] = [_joined(*layers[-2:])]
    whole = (
        replace(e, forward=max(e.forward, 0.0), backward=max(e.backward, 0.0), parameters=max(e.parameters, 0.0))
        for e in layers
    )
    return replace(chain, layers=tuple(whole))


def _joined(a: Layer, b: Layer) -> Layer:
    forward, backward = a.forward + b.forward, a.backward + b.backward
    return Layer(f"{a.name}, {b.name}", forward, backward, a.parameters + b.parameters, a.saved, b.cut)


def plan(case: Case, cluster: str, seconds: float) -> Answer:
    """The optimal plan."""
    task = problem(case, cluster)
    m = task.micro_batches
    return optimal(Request((task.chain,), task.cluster, case.batch, m, "late", copies=2, seconds=seconds, capped=False))


def released(case: Case, cluster: str, task: Problem) -> float:
    """The time of the plan of the released program, which reads the states as they are."""
    chain = read(profile_path(case.profile), states=True)
    job = Job(chain, CONFIGURATIONS[cluster], case.batch, case.micro_batch)
    stages = hybrid_plan(job, best(job)).stages
    return event_time(replace(task, chain=chain), _merged(stages))


def _merged(stages: Sequence[HybridStage]) -> tuple[HybridStage, ...]:
    """Identical pipelines are replicas already; stages keep their devices in order."""
    assert all(a.end == b.first for a, b in pairwise(stages))
    return tuple(replace(stage, devices=tuple(sorted(stage.devices))) for stage in stages)


def rows(models: Sequence[str], seconds: float) -> Iterator[tuple[object, ...]]:
    chosen = [case for case in TABLE_V if case.model in models or not models]
    for case in tqdm(chosen, leave=False, disable=None):
        for cluster in BETWEEN:
            found, task = plan(case, cluster, seconds), problem(case, cluster)
            proof = found.certificate
            assert proof is not None
            yield (
                case.model,
                cluster,
                f"{found.seconds * 1e3:.1f}",
                KNOWN.get((case.model, cluster), ""),
                f"{event_time(task, dapple(task).stages) * 1e3:.1f}",
                f"{released(case, cluster, task) * 1e3:.1f}",
                f"{proof.bound * 1e3:.1f}",
                "proven" if proof.proven else f"{proof.gap:.2%}",
                f"{proof.seconds:.1f}",
                proof.branches,
                shape(found.plan.stages),
                ", ".join(map(str, cuts(found.plan.stages))),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="for each plan, at most")
    parser.add_argument("--model", action="append", default=[], help="only this one; may be given again")
    options = parser.parse_args()
    print(tabulate(rows(options.model, options.seconds), HEAD, disable_numparse=True))


if __name__ == "__main__":
    main()
