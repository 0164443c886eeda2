"""What each stage recomputes, where that is not said. By default: what makes its device keep less. With
`memory_limit`: what it must for the fastest step in which every device stays within its memory.

What a stage keeps in the modes "never", "except_last" and "always" is known from one program. What it keeps with
"selective" is known once its backward has been lowered for that, so this is done only where something has to be
recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fxpipe.errors import warn
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.plan.plan import WHOLE_MODES, Plan, with_modes
from fxpipe.ir.program.kept_bytes import KeptBytes
from fxpipe.ir.program.program import Program
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.passes.recompute import recomputing
from fxpipe.schedules import auto_checkpoint
from fxpipe.schedules.auto_checkpoint import NothingFits
from fxpipe.schedules.simulate.simulate import StageCost

Costs = Sequence[StageCost]


@dataclass(frozen=True)
class Lowered:
    """A plan and its program.

    - `trail`: the program after each pass that changed it, by the pass's name.
    - `kept`: what each stage keeps of a micro-batch, where its backward is code.
    """

    plan: Plan
    program: Program
    trail: Mapping[str, Program | Placed]
    kept: tuple[KeptBytes | None, ...]

    def recomputing(self, modes: Sequence[str]) -> Lowered:
        """The same with other modes, of `WHOLE_MODES`, for the stages that can recompute; the others are "never"."""
        can = [stage.checkpoint != "never" for stage in self.program.stages]
        modes = [mode if able else "never" for mode, able in zip(modes, can, strict=True)]
        trail = {name: recomputing(one, modes) if isinstance(one, Program) else one for name, one in self.trail.items()}
        return replace(self, plan=with_modes(self.plan, modes), program=recomputing(self.program, modes), trail=trail)


def where_it_saves(
    lowered: Lowered, costs: Costs, schedule: Callable[[Costs], Schedule], labels: Sequence[str]
) -> Lowered:
    """The plan without the recomputations that save no device any memory. `schedule`: of a step with such costs."""
    modes = auto_checkpoint.where_it_saves(schedule, costs, labels)
    waits = [stage.offload for stage in lowered.plan.stages]  # in host memory, so a stage that recomputes sends less
    own = [
        stage.checkpoint if wait else mode for stage, mode, wait in zip(lowered.plan.stages, modes, waits, strict=True)
    ]
    return lowered.recomputing(own)


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
