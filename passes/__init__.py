"""Program -> Program, one file per pass.

`lower` cuts the graph as the plan says and applies the passes below, in this order. Each is a pure function that does
one thing, decides nothing, and returns a program that runs; if it has nothing to do, it returns the same object.
Nothing else changes a program: code is generated from the result of the last pass.

A graph whose ops have devices is rewritten by `GRAPH_PASSES`, in the same way, before it is planned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from fxpipe.errors import PlanError
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.operators import placed_graph
from fxpipe.ir.operators.collective_patterns import CollectivePattern
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.program import program as programs
from fxpipe.ir.program.program import Program
from fxpipe.passes.backward.lower_backward import lower_backward
from fxpipe.passes.copy_on_write import copy_on_write
from fxpipe.passes.cut import cut
from fxpipe.passes.defer_batch_norm import defer_batch_norm
from fxpipe.passes.pass_context import PassContext
from fxpipe.passes.portals import portals
from fxpipe.passes.recompute import recompute
from fxpipe.passes.recompute_cheap import recompute_cheap
from fxpipe.passes.relocate_devices import relocate_devices
from fxpipe.passes.replicate import replicate
from fxpipe.passes.sharding.collectives import collectives
from fxpipe.passes.sharding.group_segments import group_segments
from fxpipe.passes.sharding.move_homes import move_homes
from fxpipe.passes.sharding.shard_parameters import shard_parameters
from fxpipe.passes.stop_gradients import stop_gradients
from fxpipe.passes.tie_weights import tie_weights

__all__ = ["GRAPH_PASSES", "PASSES", "Pass", "PassContext", "cut", "lower", "rewrite_placed"]

Pass = Callable[[Program, PassContext], Program]
Value = TypeVar("Value", Program, Placed)

GRAPH_PASSES: tuple[Callable[[Placed], Placed], ...] = (shard_parameters,)

PASSES: tuple[Pass, ...] = (
    portals,
    recompute_cheap,
    tie_weights,
    move_homes,
    collectives,
    relocate_devices,
    stop_gradients,
    copy_on_write,
    recompute,
    defer_batch_norm,
    replicate,
    group_segments,
    lower_backward,
)

log = logging.getLogger("fxpipe")


def lower(
    graph: Graph,
    plan: Plan,
    watch: Callable[[str, Program], None] | None = None,
    passes: tuple[Pass, ...] = PASSES,
    samples: Mapping[str, int | None] | None = None,
    segmented: bool = False,
    backward: str = "autograd",
    owners: Mapping[str, str] | None = None,
    patterns: tuple[CollectivePattern, ...] = (),
    sizes: Mapping[str, int] | None = None,
    traces: dict[Any, Any] | None = None,
) -> Program:
    """The program for a graph and a plan. `watch(name, program)` sees it after `cut` and after each pass that changed
    it; `samples`, `segmented`, `backward`, `owners`, `sizes` and `traces` as in `PassContext`, `patterns` as its
    `collectives`.
    Raises PlanError where the model cannot be cut as planned."""
    known = {} if traces is None else traces
    context = PassContext(plan, samples, segmented, backward, owners or {}, patterns, sizes or {}, known)
    program = _step("cut", lambda: cut(graph, plan, straight=segmented), None, programs.check, watch)
    for run in passes:
        program = _step(run.__name__, partial(run, program, context), program, programs.check, watch)
    return program


def rewrite_placed(placed: Placed, devices: int, watch: Callable[[str, Placed], None] | None = None) -> Placed:
    """A strategy's graph after `GRAPH_PASSES`. `watch(name, graph)` sees it before them, as "shard", and after each
    pass that changed it. `devices`: how many there are; raises PlanError for an op on a device that is not there."""
    check = partial(placed_graph.check, devices=devices)
    try:
        check(placed)
    except ValueError as error:
        raise PlanError(str(error)) from None
    if watch:
        watch("shard", placed)
    for run in GRAPH_PASSES:
        placed = _step(run.__name__, partial(run, placed), placed, check, watch)
    return placed


def _step(
    name: str,
    run: Callable[[], Value],
    before: Value | None,
    check: Callable[[Value], None],
    watch: Callable[[str, Value], None] | None,
) -> Value:
    """Run a pass, log its time, check its result, and show it to `watch`. Raises ValueError if the check fails."""
    start = perf_counter()
    value = run()
    changed = value is not before
    log.debug("%s: %.1f ms%s", name, 1e3 * (perf_counter() - start), "" if changed else ", nothing to do")
    if changed:
        try:
            check(value)
        except ValueError as error:
            raise ValueError(f"after {name}: {error}") from None
        if watch:
            watch(name, value)
    return value
