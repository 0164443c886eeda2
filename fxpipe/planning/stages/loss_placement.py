"""A plan of a model's forward serves its training steps, too: the loss goes to where the outputs are."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.plan.plan import Plan, stage_of


def with_loss(graph: Graph, plan: Plan) -> Plan:
    """The plan with the ops of a step that it lacks, each in the stage of the last op whose value it reads; ops that
    read nothing of the plan's are in the last stage. It stays as it is where it is not one of the forward of `graph`.

    A step names what the model returns by another name than a forward call does, so of what ends the plan there may be
    ops that the graph does not have.
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
            stage[op.name] = max(read, default=last)
            rows[stage[op.name]].append(op.name)
    order = {op.name: position for position, op in enumerate(graph.ops)}
    stages = (
        replace(e, ops=tuple(sorted(row, key=order.__getitem__))) for e, row in zip(plan.stages, rows, strict=True)
    )
    return replace(plan, stages=tuple(stages))
