"""The plan with the least event time, with a lower bound on all plans.

The search space: every cut of the chain into stages, every number of replicas for each, every placement on the cluster,
and, if they are not given, the number of micro-batches, the warm-up, and which stages recompute to fit in memory. If
the request has several ways to cut ops over groups of devices, also every choice of one for each stage.

    1. seeds     plans that are known, or else data parallel and straight pipelines balanced within memory
                 (balanced_stages.py); and the plans that the bounds come with
    2. improve   the best of them, by small changes (local_search.py)
    3. refute    "a plan takes less than t", for a t between the bound and the best plan (lower_bound.py,
                 branch_and_bound.py): either no plan does, and t is the new bound, or a faster plan is found. If t is
                 the best plan's own time, that plan is proven to be optimal. A t that takes too long is lowered
                 half-way to the bound.

If 3 does not end at once, DAPPLE's own planner is asked, too, so that its plan is never faster (dapple_rival.py). If
there is not enough time for that, the certificate says so. If there are too many placements to try, as on eight servers
of four, 3 tries those in the order of the devices, and proves nothing. If there are too many devices for tables, such
as a thousand, 3 is left out, and the bound is that of lagrangian_bound.py. The bound holds whenever the search ends.
Costs of layers are scaled with the samples: see `fxpipe.ir.plan.layer_chain.scaled`.
"""

from __future__ import annotations

from time import perf_counter

from fxpipe.errors import PlanError
from fxpipe.ir.plan.model_states import model_states
from fxpipe.ir.units import show_bytes
from fxpipe.planning.hybrid.event_time import plan_of
from fxpipe.planning.hybrid.plan_request import Answer, Certificate, Request, check

from .dapple_rival import Rival
from .search_phases import PlanSearch, begin, cases_of, close_in, polish, prove, seed


def optimal(request: Request) -> Answer:
    """The fastest plan found in about the seconds of the request, with its certificate.

    Raises PlanError if the request cannot be planned for, or if no plan fits in memory.
    """
    started = perf_counter()
    check(request)
    until = started + request.seconds
    cases = cases_of(request)
    hunt = PlanSearch(cases, until)
    begin(hunt, request.known)
    if hunt.case is None:  # plans that are known come from searches that tried the plainest ones
        seed(hunt)
    close_in(hunt)
    polish(hunt)
    now = perf_counter()
    prove(hunt, now + (until - now) / 3)
    now = perf_counter()
    rival = Rival(hunt, request)
    if not request.ways:
        rival.ask(now + (until - now) * 3 / 4)
    polish(hunt)
    prove(hunt, until)
    if not request.ways:
        rival.ask(until)
    if hunt.case is None:
        raise PlanError(_too_large(request))
    problem, bound = hunt.case.problem, min(hunt.time, min(case.bound for case in cases))
    shapes = hunt.case.shapes
    plan = plan_of(problem, shapes.stages(hunt.shape), shapes.places(hunt.shape))
    certificate = Certificate(
        bound,
        1 - bound / hunt.time if hunt.time else 0.0,
        sum(case.shapes.simulated for case in cases),
        hunt.branches,
        perf_counter() - started,
        plan.samples is None,
        0 if request.ways else rival.unfinished,
        request.optimizer_sharding,
        tuple(sorted(way.degree for way in request.ways)),
        request.most_sharding,
    )
    return Answer(plan, hunt.time, certificate)


def _too_large(request: Request) -> str:
    chain = min((way.chains[0] for way in request.every), key=lambda one: one.parameters[-1])
    devices, sharding = request.cluster.devices, request.optimizer_sharding
    memory = max(device.memory for device in devices)
    replicas = len(devices) if sharding != "none" else 1
    shares = "zero1" if sharding == "auto" else sharding
    held = [sum(model_states(chain, at, at + 1, replicas, request.copies, shares)) for at in range(len(chain))]
    total = sum(model_states(chain, 0, len(chain), replicas, request.copies, shares))
    largest = max(range(len(held)), key=held.__getitem__)
    advice = "optimizer_sharding='auto', " if sharding == "none" and len(devices) > 1 else ""
    return (
        f"no plan found that fits in memory: the parameters of {chain.model} take {show_bytes(total)} with "
        f"gradients and optimizer, layer {chain.layers[largest].name!r} alone {show_bytes(held[largest])}, and the "
        f"largest of {len(devices)} devices has {show_bytes(memory)}; allow recompute, {advice}smaller micro-batches "
        "or a larger cluster"
    )
