"""Cuts the graph into the plan's stages, in the simplest correct way.

A value that a later stage uses is relayed: every stage between takes it and gives it on, so all moves are between
neighbours. The batch enters at stage 0 and the outputs leave at the last stage. A tensor of the model belongs to the
first stage that uses it and is relayed from there like any other value. Later passes improve on this. Where ops were
placed one by one, there are thousands of stages, and relays would be as many as stages times values: there, values go
straight.

    x = a(image)        stage 0    takes image        gives x
    y = b(x)            stage 1    takes x            gives x, y      x passes through
    return c(x, y)      stage 2    takes x, y         gives the output
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from fxpipe.errors import PlanError
from fxpipe.ir.graph.graph import Graph, Op
from fxpipe.ir.graph.legal_cuts import ties, vmaps
from fxpipe.ir.graph.shared_memory_values import memory_of
from fxpipe.ir.graph.value_types import may_cross, sized_by_data
from fxpipe.ir.plan import plan as plans
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.program.program import Move, Program, Stage
from fxpipe.passes.connect_stages import wire


def cut(graph: Graph, plan: Plan, straight: bool = False) -> Program:
    """The plan's stages as a program of relays; if `straight`, values go straight to all that use them. Raises
    PlanError if the model cannot be cut as planned."""
    try:
        plans.check(plan, [op.name for op in graph.ops])
    except ValueError as error:
        raise PlanError(str(error)) from None
    graph = _ordered(graph, plan)
    _refuse_torn(graph, plan)
    _refuse_changed_inputs(graph)
    stage_of = plans.stage_of(plan)
    ops: list[list[Op]] = [[] for _ in plan.stages]
    for op in graph.ops:
        ops[stage_of[op.name]].append(op)
    uses = _uses(graph, stage_of, len(plan.stages))
    owned = _owned(graph, uses, len(plan.stages))
    stages = tuple(
        Stage(index, stage.device, tuple(ops[index]), (), (), owned[index]) for index, stage in enumerate(plan.stages)
    )
    program = Program(graph, stages, (), (), graph.types)
    return wire(program, [stage.ops for stage in stages], _moves(graph, stage_of, uses, len(stages), straight))


def _uses(graph: Graph, stage_of: dict[str, int], n: int) -> dict[str, list[int]]:
    """For every name, the stages that use it, in order; stage n is the caller."""
    uses: dict[str, list[int]] = {name: [] for name in graph.types}
    for op in graph.ops:
        for name in dict.fromkeys((*op.reads, *op.writes)):
            if uses[name][-1:] != [stage_of[op.name]]:
                uses[name].append(stage_of[op.name])
    for output in graph.outputs:
        uses[output.value].append(n)
    return uses


def _owned(graph: Graph, uses: dict[str, list[int]], n: int) -> list[tuple[str, ...]]:
    """The tensors of the model that each stage owns. A constant that cannot move is owned by all its users."""
    owned: list[list[str]] = [[] for _ in range(n)]
    for state in graph.states:
        users = uses[state.name]
        for user in users[:1] if may_cross(state.type) else users:
            owned[min(user, n - 1)].append(state.name)
    return [tuple(names) for names in owned]


def _moves(
    graph: Graph, stage_of: dict[str, int], uses: dict[str, list[int]], n: int, straight: bool
) -> Iterator[Move]:
    types = graph.types
    homes = {item.name: -1 for item in graph.inputs} | stage_of
    homes |= {state.name: min(uses[state.name][0], n - 1) for state in graph.states if uses[state.name]}
    for name, home in homes.items():
        if may_cross(types[name]) and uses[name]:
            later = sorted({user for user in uses[name] if user > home})
            yield from (Move(name, home, user) for user in later if straight)
            yield from (Move(name, i, i + 1) for i in range(home, max(uses[name])) if not straight)
        elif sized_by_data(types[name]) and n in uses[name]:
            yield Move(name, home, n)
    for size in graph.sizes:  # every stage knows the sizes
        if n in uses[size.name]:
            yield Move(size.name, -1, n)


def _ordered(graph: Graph, plan: Plan) -> Graph:
    """The graph with its ops in the plan's order. Raises PlanError if they cannot run in that order."""
    planned = [name for stage in plan.stages for name in stage.ops]
    if planned == [op.name for op in graph.ops]:
        return graph
    by_name = {op.name: op for op in graph.ops}
    ordered = replace(graph, ops=tuple(by_name[name] for name in planned))
    _refuse_early(ordered)
    _refuse_swapped_writes(graph, ordered)
    _refuse_torn_vmaps(graph, ordered)
    return ordered


def _refuse_early(ordered: Graph) -> None:
    """Raise PlanError if an op runs before one whose result it reads."""
    waiting = {op.name for op in ordered.ops}
    for op in ordered.ops:
        early = next((name for name in (*op.reads, *op.writes) if name in waiting), None)
        if early:
            raise PlanError(f"the plan runs op {op.name}, at {op.origin}, before op {early}, whose result it reads; "
                            f"place {op.name} after {early}")  # fmt: skip
        waiting.discard(op.name)


def _refuse_swapped_writes(graph: Graph, ordered: Graph) -> None:
    """Raise PlanError if an op moves past another one that writes memory it reads."""
    before, after = _epochs(graph, graph), _epochs(graph, ordered)
    for op in ordered.ops:
        if before[op.name] != after[op.name]:
            raise PlanError(f"the plan moves op {op.name}, at {op.origin}, past an op that changes in place what it "
                            f"reads; keep the model's own order of these ops")  # fmt: skip


def _epochs(graph: Graph, ordered: Graph) -> dict[str, tuple[tuple[str, int], ...]]:
    """For every op, and all written memory that it touches: how many earlier writes there are, in `ordered`."""
    root = memory_of(graph)
    written = {root[name]: 0 for op in graph.ops for name in op.writes}
    epochs = {}
    for op in ordered.ops:
        touched = {root[name] for name in (*op.reads, *op.writes)} & written.keys()
        epochs[op.name] = tuple((name, written[name]) for name in sorted(touched))
        for name in {root[name] for name in op.writes}:
            written[name] += 1
    return epochs


def _refuse_torn_vmaps(graph: Graph, ordered: Graph) -> None:
    """Raise PlanError if the ops of a vmap do not follow each other as in the model: what runs between entering and
    leaving a vmap is part of it."""
    place = {op.name: at for at, op in enumerate(ordered.ops)}
    for first, last in vmaps(graph.ops):
        for op, after in pairwise(graph.ops[first : last + 1]):
            if place[after.name] != place[op.name] + 1:
                raise PlanError(
                    f"the plan does not place op {after.name}, at {after.origin}, right after op {op.name}, and both "
                    f"are part of a vmap; keep the model's own order there"
                )


def _refuse_torn(graph: Graph, plan: Plan) -> None:
    """Raise PlanError if ops that are tied together are in different stages."""
    starts = list(accumulate(len(stage.ops) for stage in plan.stages))[:-1]
    stage_of = plans.stage_of(plan)
    for tie in ties(graph):
        first, last = graph.ops[tie.first], graph.ops[tie.last]
        if stage_of[first.name] == stage_of[last.name]:
            continue
        index = stage_of[first.name]
        after = graph.ops[starts[index]]
        raise PlanError(
            f"the model cannot be cut before op {after.name}, at {after.origin}: {tie.reason}. "
            f"Keep ops {first.name} to {last.name}, at {last.origin}, in one stage"
        )


def _refuse_changed_inputs(graph: Graph) -> None:
    """Raise PlanError if the model returns an input that it changes in place: stages write to copies of the inputs, so
    the input itself stays unchanged."""
    inputs = {item.name for item in graph.inputs} & {output.value for output in graph.outputs}
    for op in graph.ops:
        for name in inputs.intersection(op.writes):
            raise PlanError(
                f"op {op.name}, at {op.origin}, changes the input {name!r} in place, and the model returns that input; "
                f"write to a copy ({name}.clone()) and return the copy"
            )
