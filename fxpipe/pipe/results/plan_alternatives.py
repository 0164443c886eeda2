"""Why this plan: the time of a step with other plans, and on other hardware.

why
  optimal        1.72 s            412 plans simulated, 12 branches, 2.1 s
  data parallel  5.87 s   +241%
  straight       3.20 s   + 86%
what if
  one more device      1.66 s   -3%
  twice the bandwidth  1.55 s  -10%
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from fxpipe.errors import PlanError
from fxpipe.ir.cluster.what_if import one_more, widened
from fxpipe.ir.plan.hybrid_plan import shape
from fxpipe.ir.plan.model_states import ZERO
from fxpipe.ir.timeline import Timeline
from fxpipe.ir.units import show_seconds
from fxpipe.pipe.progress import timed
from fxpipe.planning.hybrid.plan_request import Answer, Request
from fxpipe.planning.hybrid.planners import search

OTHERS = ("data parallel", "straight", "dapple")
DAPPLE_SECONDS = 10.0  # that its search may take; on 16 devices it takes less than one
Row = tuple[str, str, str, str]
Find = Callable[[str, Request], Answer]


@dataclass(frozen=True)
class TriedSize:
    """What a planner found with groups of `size` devices.

    - `seconds`: of the step of its plan; None if there is no plan, and then `refusal` says why.
    - `prices`: of a byte in memory, in seconds per byte and micro-batch: each gave a way to cut ops that was searched.
      0 is the fastest way, and the one that `seconds` is with, if there is a plan with it.
    """

    size: int
    seconds: float | None = None
    refusal: str = ""
    prices: tuple[float, ...] = ()


def explain(planner: str, find: Find, request: Request, chosen: Answer, timeline: Timeline, size: int = 1) -> str:
    """A text: the plans of other planners beside the chosen one, and the time of a step on more hardware, for which
    `find` finds the plan. With `size` above 1 a device of the request stands for that many. If the request has several
    ways, other planners have one for all stages: the first one of each size."""
    ways = {way.degree: way for way in reversed(request.every)}
    rivals = []
    for degree, way in sorted(ways.items()):
        alone = replace(request, chains=way.chains, cluster=way.cluster, ways=())
        note = f", tensor parallel {degree}" if len(ways) > 1 else ""
        rivals += [_rival(name, alone, chosen, note) for name in OTHERS if name != planner]
    lines = [_pace(timeline, len(chosen.plan.stages)), "", "why", *_table([_own(planner, chosen), *rivals])]
    return "\n".join([*lines, "", "what if", *_table(_what_if(planner, find, request, chosen, size))])


def sizes(tried: Sequence[TriedSize]) -> str:
    """A text: the time of a step with each tensor-parallel size, or why there is no plan, and in which ways ops were
    cut; empty if none was tried."""
    if not tried:
        return ""
    best = min((one.seconds for one in tried if one.seconds is not None), default=0.0)
    rows = [
        (str(one.size), "", "", f"{one.refusal}{_prices(one, '; ')}")
        if one.seconds is None
        else (str(one.size), show_seconds(one.seconds), f"{one.seconds / best - 1:+.1%}", _prices(one))
        for one in tried
    ]
    return "\n".join(["tensor parallel", *_table(rows), *_scope(tried)])


def _prices(tried: TriedSize, before: str = "") -> str:
    """The ways to cut ops that hold less than the fastest one, if some were searched."""
    if len(tried.prices) < 2:
        return ""
    prices = ", ".join(f"{price:.2g}" for price in tried.prices)
    return f"{before}{len(tried.prices)} ways to cut ops, at prices of {prices} s per byte"


def _scope(tried: Sequence[TriedSize]) -> Iterator[str]:
    """Lines on what was searched."""
    yield "  A row is for plans whose stages all have this size, with its fastest way to cut ops."
    if any(len(one.prices) > 1 for one in tried):
        yield "  Memory is a limit, so slower ways that hold less were searched, too: for each price in s per byte the"
        yield "  one with the least time for a micro-batch + price * bytes that a device holds (a Pareto front)."
    else:
        yield "  The fastest way to cut ops of each size was searched, and no other."
    yield "  A certificate is for plans whose stages have these ways: with others there may be faster plans."


def _pace(line: Timeline, stages: int) -> str:
    """A line on what limits the step: the slowest stage, or devices of several, and the time of adding up gradients."""
    slowest = max(range(len(line.busy)), key=line.busy.__getitem__)
    last = max((span.end for span in line.spans if span.kind != "A"), default=0.0)
    which = f"stage {slowest} sets" if stages == len(line.busy) else f"{line.devices[slowest]} set"
    facts = [f"{which} the pace: computing takes {line.busy[slowest] / line.makespan:.0%} of the time"]
    if line.end > last:
        facts.append(f"{show_seconds(line.end - last)} of the step are replicas adding up gradients")
    return "; ".join(facts)


def _own(planner: str, chosen: Answer) -> Row:
    """The plan itself; what is proven of it stands above."""
    effort = "" if chosen.certificate is None else chosen.certificate.effort
    return f"{planner} {shape(chosen.plan.stages)}", show_seconds(chosen.seconds), "", effort


def _rival(name: str, request: Request, chosen: Answer, note: str = "") -> Row:
    """The best plan of another planner, with its own choice of micro-batches and warm-up; for DAPPLE, whose search is
    slow, with the micro-batches of the chosen plan, if it ends in time. `note` follows the planner's name."""
    with timed(name):
        try:
            if name == "dapple":
                count = chosen.plan.micro_batches
                answer = search(name, replace(request, micro_batches=count, seconds=DAPPLE_SECONDS))
            else:
                answer = search(name, request)
        except PlanError as error:
            return f"{name}{note}", "", "", str(error)
    m = answer.plan.micro_batches
    facts = f"{m} micro-batch{'es' if m > 1 else ''}, {answer.plan.warmup} warm-up"
    facts += f", its search did not end in {show_seconds(DAPPLE_SECONDS)}" * (answer.unfinished > 0)
    return _row(f"{name} {shape(answer.plan.stages)}{note}", answer, chosen, facts)


def _what_if(planner: str, find: Find, request: Request, chosen: Answer, size: int) -> list[Row]:
    """The same planner, with the micro-batches of the plan, so that nothing else differs: on a changed cluster; and
    with less of its sharding, if the plan has some, or with more, if some stages recompute."""
    more = "one more device" if size == 1 else f"{size} more devices"
    own = replace(request, micro_batches=chosen.plan.micro_batches)
    same = replace(own, warmup=chosen.plan.warmup)
    ways = tuple(replace(way, cluster=widened(way.cluster, 2)) for way in request.ways)
    changes = {} if ways else {more: replace(same, cluster=one_more(request.cluster))}
    changes["twice the bandwidth"] = replace(same, cluster=widened(request.cluster, 2), ways=ways)
    sharded = chosen.plan.optimizer_sharding
    if chosen.plan.shards_optimizer:
        changes[f"without {ZERO[sharded]}"] = replace(own, optimizer_sharding="none")
        if sharded == "zero3":
            changes["with ZeRO-1"] = replace(own, optimizer_sharding="zero1")
    elif request.optimizer_sharding == "none" and any(stage.recompute for stage in chosen.plan.stages):
        kinds = replace(own, optimizer_sharding="auto").shardings[1:]
        changes |= {f"with {ZERO[kind]}": replace(own, optimizer_sharding=kind) for kind in kinds}
    rows = []
    for name, changed in changes.items():
        with timed(name):
            try:
                answer = find(planner, changed)
            except PlanError as error:
                rows.append((name, "", "", str(error)))
                continue
        rows.append(_row(name, answer, chosen, shape(answer.plan.stages)))
    return rows


def _row(name: str, answer: Answer, chosen: Answer, facts: str) -> Row:
    return name, show_seconds(answer.seconds), f"{answer.seconds / chosen.seconds - 1:+.1%}", facts


def _table(rows: list[Row]) -> list[str]:
    table = tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=("left", "right", "right", "left"))
    return [f"  {line}".rstrip() for line in table.splitlines()]
