"""Program -> Program, one file per pass.

`lower` cuts the graph as the plan says and applies the passes below, in this order. Each is a pure function that does
one thing, decides nothing, and leaves a program that runs; where it finds nothing to do, it returns the same object.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter

from fxpipe.ir.graph import Graph
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program, check
from fxpipe.passes.cut import cut
from fxpipe.passes.defer_batch_norm import defer_batch_norm
from fxpipe.passes.hold import hold
from fxpipe.passes.mutations import mutations
from fxpipe.passes.place import place
from fxpipe.passes.portals import portals
from fxpipe.passes.recompute import recompute
from fxpipe.passes.recompute_cheap import recompute_cheap
from fxpipe.passes.replicate import replicate
from fxpipe.passes.share import share
from fxpipe.passes.stop_gradients import stop_gradients

__all__ = ["PASSES", "Pass", "cut", "hold", "lower", "replicate"]

Pass = Callable[[Program, Plan], Program]

PASSES: tuple[Pass, ...] = (
    portals,
    recompute_cheap,
    share,
    place,
    stop_gradients,
    mutations,
    recompute,
    defer_batch_norm,
)

log = logging.getLogger("fxpipe")


def lower(
    graph: Graph,
    plan: Plan,
    watch: Callable[[str, Program], None] | None = None,
    passes: tuple[Pass, ...] = PASSES,
) -> Program:
    """The program for a graph and a plan. `watch(name, program)` sees it after `cut` and after each pass that changed
    it. Raises PlanError where the model cannot be cut as planned."""
    program = _step("cut", lambda: cut(graph, plan), None, watch)
    for run in passes:
        program = _step(run.__name__, partial(run, program, plan), program, watch)
    return program


def _step(
    name: str, run: Callable[[], Program], before: Program | None, watch: Callable[[str, Program], None] | None
) -> Program:
    """One pass: run, timed, checked and shown."""
    start = perf_counter()
    program = run()
    changed = program is not before
    log.debug("%s: %.1f ms%s", name, 1e3 * (perf_counter() - start), "" if changed else ", nothing to do")
    if changed:
        _check(name, program)
        if watch:
            watch(name, program)
    return program


def _check(name: str, program: Program) -> None:
    try:
        check(program)
    except ValueError as error:
        raise ValueError(f"after {name}: {error}") from None
