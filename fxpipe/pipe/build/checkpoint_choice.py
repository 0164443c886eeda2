"""What each stage recomputes, where that is not said. By default: as little as lets its device keep no more than if
stages kept nothing but what they take. With `memory_limit`: what it must for the fastest step in which every device
stays within its memory.

What a stage keeps in the modes "never", "except_last" and "always" is known from one program. What it keeps with
"selective" is known once its backward has been lowered for that, so this is done only where something has to be
recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fxpipe.errors import warn
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.plan.plan import WHOLE_MODES, Plan, with_modes
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.schedules import auto_checkpoint
from fxpipe.schedules.auto_checkpoint import NothingFits
from fxpipe.schedules.simulate.simulate import StageCost

from .lowering import Lowered

Costs = Sequence[StageCost]
HOPED = 4  # one part in so many of what a stage keeps is kept at least, where the rest is cheap to compute


def where_it_saves(
    lowered: Lowered,
    costs: Callable[[Lowered], Costs],
    schedule: Callable[[Costs], Schedule],
    labels: Sequence[str],
    lower: Callable[[Plan], Lowered] | None,
) -> Lowered:
    """The plan with the least recomputation for which each device keeps at its peak no more than if every stage had its
    mode in the plan, "except_last". `schedule`: of a step with such costs; the others as of `chosen`."""
    own, count = costs(lowered), len(lowered.plan.stages)
    never = costs(lowered.recomputing(["never"] * count))
    # In host memory, what a stage keeps waits: one that recomputes sends less.
    waits = [stage.offload for stage in lowered.plan.stages]

    def modes(partly: Costs) -> list[str]:
        """The modes, with these costs of stages that may be selective."""
        ways = []
        for whole, part, least, wait in zip(never, partly, own, waits, strict=True):
            again = least.forward * (1 - 1 / lowered.plan.chunks)  # on average: not that of the last micro-batch
            helps = part.checkpoint == "selective" and part.backward <= least.backward + again
            ways.append((least,) if wait else (whole, part, least) if helps else (whole, least))
        return [cost.checkpoint for cost in auto_checkpoint.where_it_saves(schedule, ways, labels)]

    hoped = modes([_hoped(cost) for cost in never] if lower else never)
    if lower is None or "selective" not in hoped:
        return lowered.recomputing(hoped)
    found = lower(with_modes(lowered.plan, hoped))
    better = modes(costs(found))
    if better == hoped:
        return found
    return lower(with_modes(lowered.plan, better)) if "selective" in better else lowered.recomputing(better)


def _hoped(cost: StageCost) -> StageCost:
    """What a stage costs with "selective" at best, before it is lowered for that; as it is if that is not known."""
    if cost.kept is None:
        return cost
    saved, handed = (
        {piece: count // HOPED for piece, count in memory.items()} for memory in (cost.kept.saved, cost.kept.handed)
    )
    return replace(cost, kept=replace(cost.kept, saved=saved, handed=handed), checkpoint="selective")


def chosen(
    lowered: Lowered,
    costs: Callable[[Lowered], Costs],
    fastest: Callable[[Sequence[Costs]], Costs],
    lower: Callable[[Plan], Lowered] | None,
    check: Callable[[Lowered], None],
) -> Lowered:
    """The plan with the modes that make the fastest step.

    - `lowered`: the plan, in which every stage that can recompute does.
    - `costs`: what stages cost; `fastest`: of several costs for each stage, those of the fastest step.
    - `lower`: lowers a plan anew; None if backward is not code, so that nothing can be selective.
    - `check`: raises NothingFits if a step does not stay within memory.

    Raises NothingFits.
    """
    count = len(lowered.plan.stages)
    every = zip(*(costs(lowered.recomputing([mode] * count)) for mode in WHOLE_MODES), strict=True)
    ways = [several if several[-1].checkpoint != "never" else several[:1] for several in every]
    modes: list[str] | None = None
    try:
        modes = [cost.checkpoint for cost in fastest(ways)]
    except NothingFits:
        if lower is None:
            raise
    if modes is not None and (lower is None or set(modes) == {"never"}):
        return lowered.recomputing(modes)
    assert lower is not None
    partly = costs(lower(with_modes(lowered.plan, ["selective"] * count)))
    # By the bytes that they keep, the most first, as in WHOLE_MODES.
    more = [
        (never, part, *others) if part.checkpoint == "selective" else (never, *others)
        for (never, *others), part in zip(ways, partly, strict=True)
    ]
    try:
        better = [cost.checkpoint for cost in fastest(more)]
        found = lower(with_modes(lowered.plan, better)) if "selective" in better else lowered.recomputing(better)
        check(found)
    except NothingFits:
        if modes is None:
            raise
        return lowered.recomputing(modes)
    return found


def tell_of_checkpoints(plan: Plan, graph: Graph) -> bool:
    """Warn if the model asks for checkpoints that a stage does not make. Returns whether it did."""
    kept = [str(stage) for stage, one in enumerate(plan.stages) if one.checkpoint == "never"]
    if graph.checkpointed is None or not kept:
        return False
    which = "its stages keep all" if len(kept) == len(plan.stages) else f"stages {', '.join(kept)} keep all"
    warn(
        f"{graph.checkpointed or graph.model}\nthe model asks for checkpoints of activations here. checkpoint= of the "
        f'pipe decides that in its place, and {which} that backward needs: write checkpoint="always" to recompute '
        'each stage from what it takes, "except_last" for all but the last micro-batch, or give memory_limit='
    )
    return True
