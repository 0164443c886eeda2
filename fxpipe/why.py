"""Why this plan: what a step would take with others, and on other hardware.

why
  optimal        1.72 s            proven optimal: no plan takes less
  data parallel  5.87 s   +241%
  straight       3.20 s   + 86%
what if
  one more device      1.66 s   -3%
  twice the bandwidth  1.55 s  -10%
"""

from __future__ import annotations

from dataclasses import replace

from tabulate import tabulate

from .clock import timed
from .errors import PlanError
from .ir.cluster import Cluster
from .ir.hybrid import shape
from .ir.units import show_seconds
from .ir.what_if import one_more, widened
from .planned import Planned, show
from .planning.planners import SLOW_DEVICES, Request, search

OTHERS = ("data parallel", "straight", "dapple")
Row = tuple[str, str, str, str]


def explain(planned: Planned) -> str:
    """The plan, its rivals, and what more hardware would be worth."""
    lines = [show(planned), "", _pace(planned), "", "why", *_table([_own(planned), *_rivals(planned)])]
    return "\n".join([*lines, "", "what if", *_table(_what_if(planned))])


def _pace(planned: Planned) -> str:
    """What a faster step would have to change."""
    line = planned.timeline
    slowest = max(range(len(line.busy)), key=line.busy.__getitem__)
    last = max((span.end for span in line.spans if span.kind != "A"), default=0.0)
    facts = [f"stage {slowest} sets the pace: it computes {line.busy[slowest] / line.makespan:.0%} of the time"]
    if line.end > last:
        facts.append(f"{show_seconds(line.end - last)} of the step are replicas adding up gradients")
    return "; ".join(facts)


def _own(planned: Planned) -> Row:
    proof = "" if planned.certificate is None else str(planned.certificate)
    return f"{planned.planner} {shape(planned.layers.stages)}", show_seconds(planned.seconds), "", proof


def _rivals(planned: Planned) -> list[Row]:
    return [_rival(planned, name) for name in OTHERS if name != planned.planner]


def _rival(planned: Planned, name: str) -> Row:
    """The best that another planner finds, with the micro-batches and warm-up that suit it; of DAPPLE, whose search
    takes a while, with the plan's micro-batches."""
    request = planned.request
    if name == "dapple" and len(planned.cluster.devices) >= SLOW_DEVICES:
        return name, "", "", f"not tried: its search takes long for {len(planned.cluster.devices)} devices"
    with timed(name):
        try:
            if name == "dapple":
                request = replace(request, micro_batches=planned.layers.micro_batches)
            answer = search(name, request)
        except PlanError as error:
            return name, "", "", str(error)
    m = answer.plan.micro_batches
    facts = f"{m} micro-batch{'es' if m > 1 else ''}, {answer.plan.warmup} warm-up"
    return _row(planned, f"{name} {shape(answer.plan.stages)}", answer.seconds, facts)


def _what_if(planned: Planned) -> list[Row]:
    """The same planner on a changed cluster."""
    changes: dict[str, Cluster] = {
        "one more device": one_more(planned.cluster),
        "twice the bandwidth": widened(planned.cluster, 2),
    }
    rows = []
    for name, cluster in changes.items():
        request = _same(planned, cluster)
        with timed(name):
            try:
                answer = search(planned.planner, request)
            except PlanError as error:
                rows.append((name, "", "", str(error)))
                continue
        rows.append(_row(planned, name, answer.seconds, shape(answer.plan.stages)))
    return rows


def _same(planned: Planned, cluster: Cluster) -> Request:
    """With the micro-batches of the plan, so that nothing but the cluster differs."""
    return replace(
        planned.request, cluster=cluster, micro_batches=planned.layers.micro_batches, warmup=planned.layers.warmup
    )


def _row(planned: Planned, name: str, seconds: float, facts: str) -> Row:
    return name, show_seconds(seconds), f"{seconds / planned.seconds - 1:+.1%}", facts


def _table(rows: list[Row]) -> list[str]:
    table = tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=("left", "right", "right", "left"))
    return [f"  {line}".rstrip() for line in table.splitlines()]
