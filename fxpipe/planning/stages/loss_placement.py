"""Turns a plan of a model's forward into one of its training steps: the loss goes to where the outputs are."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.plan.plan import Plan, stage_of


def with_loss(graph: Graph, plan: Plan) -> Plan:
    """The plan with the ops of a step that it lacks, each in the stage of the last op whose value it reads; ops that
    read nothing of the plan's, or give what the epilogue takes, are in the last stage. A plan that is not one of the
    forward of `graph` stays as it is.

    A step and a forward call give ops that make outputs different names, so the graph may lack the last ops of the
    plan.
    """
    stage = stage_of(plan)
    captured = {op.name for op in graph.ops}
    ending = set(plan.stages[-1].ops[-len(graph.outputs) :]) if plan.stages else set()
    if graph.loss is None or not stage.keys() - captured <= ending:
        return plan
    rows = [[op for op in e.ops if op in captured] for e in plan.stages]
    last = len(rows) - 1
    for op in graph.ops:
        if op.name not in stage:
            read = [stage[name] for name in op.reads if name in stage]
            stage[op.name] = last if op.name in graph.taken else max(read, default=last)
            rows[stage[op.name]].append(op.name)
    order = {op.name: position for position, op in enumerate(graph.ops)}
    stages = (
        replace(e, ops=tuple(sorted(row, key=order.__getitem__))) for e, row in zip(plan.stages, rows, strict=True)
    )
    return replace(plan, stages=tuple(stages))
