"""The plan for a request: the planner's own, or for a schedule with several stages on each device a looped pipeline."""

from __future__ import annotations

from fxpipe.errors import PlanError
from fxpipe.ir.plan.hybrid_plan import HybridPlan
from fxpipe.planning.hybrid.event_time import Problem
from fxpipe.planning.hybrid.looped_pipeline import LoopedOrder, Simulated, looped
from fxpipe.planning.hybrid.plan_request import Answer, Request
from fxpipe.planning.hybrid.planners import search
from fxpipe.schedules.make_schedule import LOOPED, SPLIT, form, placement
from fxpipe.schedules.simulate.hybrid_costs import order_of, rows, simulate_hybrid

PER_DEVICE = (2, 4)  # numbers of stages to try


def find_plan(
    planner: str, request: Request, schedule: str | None = None, stages_per_device: int | None = None
) -> Answer:
    """The answer of the planner of this name. For a schedule of `LOOPED` that is the looped pipeline of the shortest
    step. Raises PlanError if there is no plan, or none that fits in memory."""
    if schedule not in LOOPED:
        if stages_per_device not in (None, 1):
            raise PlanError(
                f"stages_per_device is {stages_per_device}, and with schedule={schedule!r} each device has one stage; "
                "write schedule='interleaved'"
            )
        return search(planner, request)
    if planner != "optimal":
        raise PlanError(
            f"planner={planner!r} gives each device one stage, and {schedule!r} needs several: leave out one of them"
        )
    return looped(request, looped_order(schedule, stages_per_device))


def most_sharding(schedule: str | None, tensor_parallel: int) -> str:
    """The most that "auto" may shard. Plans with ZeRO-3 run where each backward is one action, on whole parameters."""
    return "zero1" if schedule in SPLIT or tensor_parallel > 1 else "zero3"


def looped_order(schedule: str, stages_per_device: int | None = None) -> LoopedOrder:
    """A schedule of `LOOPED`, with this number of stages on each device, or with each that it can have."""
    per_device = (2,) if form(schedule).shape == "v" else PER_DEVICE

    def place(devices: int, times: int) -> tuple[int, ...]:
        names = [str(device) for device in range(devices)]
        try:
            return tuple(map(int, placement(schedule, names, times)))
        except ValueError as error:
            raise PlanError(str(error)) from None

    def simulated(problem: Problem, plan: HybridPlan) -> Simulated:
        line = simulate_hybrid((problem.chain,), problem.cluster, plan, order_of(schedule, plan), problem.copies)
        held = dict(zip(rows(plan.stages), line.high_water, strict=True))
        return line.makespan, [held[stage.devices] for stage in plan.stages]

    return LoopedOrder(per_device if stages_per_device is None else (stages_per_device,), place, simulated)
