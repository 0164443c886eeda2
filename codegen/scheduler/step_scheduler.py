"""The scheduler of a program for whole training steps, as a Python file: a row of actions for each worker, and for each
stage what an action takes, computes and sends.

    class Scheduler(StepScheduler):
        rows                                      the schedule
        forward_1(m, i)                           stage 1 on micro-batch i
        backward_1(m, i)                          or in two halves:
        input_gradient_1(m, i), weight_gradient_1(m, i)

Micro-batches are not unrolled, so the file grows with the stages, and only the rows with the micro-batches.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from fxpipe.codegen.scheduler.schedule_grid import portals, recomputed
from fxpipe.codegen.scheduler.scheduler_class import attributes, differentiable, draws, lend, row, section
from fxpipe.codegen.scheduler.value_locations import Places
from fxpipe.codegen.text.line_layout import INDENT, WIDTH, Brackets, prefix
from fxpipe.codegen.text.source_names import clip, doc_prose, quoted, string
from fxpipe.codegen.text.statements import (
    BLANK,
    INSIDE,
    Assign,
    Block,
    Call,
    Comment,
    Lines,
    Statement,
    apart,
    rows_of,
    text_of,
)
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.program.program import Program, Stage, recut
from fxpipe.ir.schedule.schedule import Schedule, plain, show
from fxpipe.ir.units import count

TAKEN = frozenset(("self", "m", "i", "draw", "forward"))  # names that the methods use themselves


def emit_steps(program: Program, schedule: Schedule, plan: Plan, totals: Program | None = None) -> str:
    """The source of `scheduler.py`. The rows of `schedule` are the program's devices in order of first appearance;
    `totals`, of one stage, computes what the micro-batches must know of the whole batch."""
    places = Places(program)
    kinds = {action.kind for action in schedule.place}
    replicated = any(stage.replicas for stage in program.stages)
    base, file = (
        ("ReplicatedScheduler", "local.replica_step") if replicated else ("StepScheduler", "common.step_engine")
    )
    offloaded = rows_of("offloaded", (str(index) for index, stage in enumerate(plan.stages) if stage.offload))
    head = [*attributes(program, places, totals), *_attributes(program, places, schedule)]
    if offloaded:
        head += [BLANK, Comment("stages whose activations wait in host memory"), *offloaded]
    sections = [section(s, (_forward(s, places), *_backward(s, places, kinds))) for s in program.stages]
    body = apart([head, lend(program, places, "Step"), *sections])
    imports = [f"from fxpipe.engines.{file} import {', '.join(sorted(('Gradients', base, 'Step')))}"]
    if any(op.random for stage in program.stages for op in stage.ops):
        imports.append("from fxpipe.runtime import Draws")
    lines = text_of([Block(f"class Scheduler({base}):", body)])
    return "\n".join([*_docstring(program, schedule), "", *imports, "", "", *lines]) + "\n"


# The top of the file --------------------------------------------------------------------------------------------------


def _docstring(program: Program, schedule: Schedule) -> list[str]:
    """The schedule as a grid, and how to read it."""
    grid = show(schedule, [doc_prose(label) for label in dict.fromkeys(program.devices)]).splitlines()[1:]
    n = len(program.stages)
    facts = f"{count(n, 'stage', 'stages')}, {count(schedule.chunks, 'micro-batch', 'micro-batches')}, "
    facts += doc_prose(schedule.name) + recomputed(program)
    kinds = {action.kind for action in schedule.place}
    stage = "" if plain(schedule) else str(min(2, n - 1))
    what = stage and f" on stage {stage}"
    whole = f"{stage}B1 its backward"
    back = f"{stage}I1 and {stage}W1 the two halves of its backward, for what it takes and for its weights"
    order = (
        f"{stage}F1 is the forward of micro-batch 1{what}, {whole if 'B' in kinds else back}. Each device "
        "runs its row in this order: an action starts when the one before it is done and what it takes has arrived, "
        "and waits for nothing else."
    )
    return [
        clip(f'"""{doc_prose(program.graph.model)}, trained: {facts}.', WIDTH),
        "",
        *(_clipped(INDENT + line) for line in grid),
        "",
        *textwrap.wrap(order, WIDTH),
        *portals(program),
        '"""',
    ]


def _clipped(line: str) -> str:
    """A line of the grid, as much as fits."""
    return line if len(line) <= WIDTH else line[: WIDTH - 4].rsplit(" ", 1)[0].rstrip() + " ..."


def _attributes(program: Program, places: Places, schedule: Schedule) -> Iterator[Statement]:
    yield from rows_of(
        "feeds",
        (
            row(places.name(name), stage.index)
            for stage in program.stages
            for name in stage.takes
            if places.sources.get((name, stage.index)) == -1
        ),
    )
    cuts = [
        row(places.name(move.value), move.source, move.target, move.dim)
        for move in program.moves
        if recut(move, program)
    ]
    if cuts:
        yield Comment("values that other numbers of replicas cut in another way: from, to, dimension of the samples")
        yield from rows_of("cuts", cuts)
    yield Comment("of each stage, what of its arguments and of its results has a gradient, and its place there")
    yield from rows_of("gradients", (_graded(stage, places) for stage in program.stages))
    loss = next((output for output in program.graph.outputs if output.value == program.graph.loss), None)
    if loss is not None and loss.reduce is not None:
        yield Assign(("loss_reduce",), string(loss.reduce))
    yield Assign(("schedule",), string(schedule.name))
    labels = [quoted(label) for label in dict.fromkeys(program.devices)]
    width, bare = max(map(len, labels)) + 2, plain(schedule)
    lines = ['rows = """']
    for label, actions in zip(labels, schedule.devices, strict=True):
        text = " ".join(action.short if bare else str(action) for action in actions)
        lines += textwrap.wrap(text, INSIDE, initial_indent=label.ljust(width), subsequent_indent=" " * width)
    yield Lines((*lines, '"""'))


def _graded(stage: Stage, places: Places) -> Brackets:
    def found(names: Sequence[str]) -> Brackets:
        graded = ((at, name) for at, name in enumerate(names) if differentiable(name, places.program))
        return Brackets("{", tuple(f"{string(places.name(name))}: {at}" for at, name in graded), "}", "literal")

    return Brackets("Gradients(", (prefix("takes=", found(stage.takes)), prefix("gives=", found(stage.gives))), ")")


# Forward --------------------------------------------------------------------------------------------------------------


def _forward(stage: Stage, places: Places) -> Block:
    j, program = stage.index, places.program
    body: list[Statement] = []
    arriving = [name for name in stage.takes if (name, j) in places.sources]
    if arriving:
        sources = dict.fromkeys(places.sources[name, j] for name in arriving)
        if set(sources) != {-1}:
            known = (f"stage {source}" if source >= 0 else "the batch" for source in sources)
            body.append(Comment(f"from {', '.join(known)}"))
        messages = (str(j), "i", *(string(places.name(name)) for name in arriving))
        body.append(Assign(tuple(_variable(name, places) for name in arriving), Call("m.receive", messages)))
    draw = draws(stage, "m.stages")
    body += draw
    takes = (_variable(name, places) if name in arriving else f"m[i].{places.name(name)}" for name in stage.takes)
    args = (str(j), "i", *takes, *places.borrowed(stage), *(("draw",) if draw else ()))
    forward = "m.forward"
    if stage.checkpoint == "always":
        body.append(Comment("computed again in backward; skipped when backward runs next"))
        forward = "m.forward_to_recompute"
    elif stage.checkpoint == "except_last":
        body.append(Comment("all but the last are computed again in backward; skipped when backward runs next"))
        body.append(Assign(("forward",), "m.forward if i == m.last else m.forward_to_recompute"))
        forward = "forward"
    body.append(Assign(tuple(_variable(name, places) for name in stage.gives), Call(forward, args)))
    for name in stage.gives:
        variable = _variable(name, places)
        for target in _targets(name, stage, program):
            if target == len(program.stages):
                detach = ".detach()" if isinstance(program.types[name], TensorType) else ""  # a number has no graph
                body.append(Assign((f"m[i].{places.name(name)}",), variable + detach))
            else:
                body.append(Call("m.send", (str(j), "i", string(places.name(name)), variable, f"to={target}")))
    return Block(f"def forward_{j}(self, m: Step, i: int) -> None:", tuple(body))


def _targets(name: str, stage: Stage, program: Program) -> list[int]:
    """The stages that the value goes to, the caller last."""
    return sorted(move.target for move in program.moves if move.value == name and move.source == stage.index)


def _variable(name: str, places: Places) -> str:
    variable = places.name(name)
    return f"{variable}_" if variable in TAKEN else variable


# Backward -------------------------------------------------------------------------------------------------------------


def _backward(stage: Stage, places: Places, kinds: Iterable[str]) -> Iterator[Block]:
    """The methods for the kinds of actions that the schedule has."""
    j = stage.index
    for kind, method in (("B", "backward"), ("I", "input_gradient")):
        if kind in kinds:
            yield Block(f"def {method}_{j}(self, m: Step, i: int) -> None:", _gradients(stage, places, f"m.{method}"))
    if "W" in kinds:
        whole = Call("m.weight_gradient", (str(j), "i"))
        yield Block(f"def weight_gradient_{j}(self, m: Step, i: int) -> None:", (whole,))


def _gradients(stage: Stage, places: Places, method: str) -> tuple[Statement, ...]:
    """The body of a backward method: receive the gradients of the gives, compute, send the gradients of the takes."""
    j, program = stage.index, places.program
    body: list[Statement] = []
    if stage.checkpoint != "never":
        body.append(Assign((), Call("m.recompute", (str(j), "i")), "while the gradients are on their way"))
    roots = []
    for name in stage.gives:
        if differentiable(name, program):
            body.append(_root(name, stage, places))
            roots.append(_gradient(name, places))
    takes = [name for name in stage.takes if differentiable(name, program)]
    sent = [name for name in takes if places.sources[name, j] >= 0]
    found = tuple(_gradient(name, places) if name in sent else "_" for name in takes)
    body.append(Assign(found if sent else (), Call(method, (str(j), "i", *roots))))
    for name in sent:
        to, value = f"to={places.sources[name, j]}", string(places.name(name))
        body.append(Call("m.send_gradient", (str(j), "i", value, _gradient(name, places), to)))
    return tuple(body)


def _root(name: str, stage: Stage, places: Places) -> Statement:
    """The gradient of a value that the stage gives: the sum of the gradients from all stages that take it."""
    program, own = places.program, (str(stage.index), "i", string(places.name(name)))
    users = (target for target in _targets(name, stage, program) if target < len(program.stages))
    parts = [Brackets("m.receive_gradient(", (*own, f"source={user}"), ")") for user in users]
    if name == program.graph.loss:
        parts.insert(0, Brackets("m.root(", own, ")"))
    if not parts:
        return Assign((_gradient(name, places),), "None", "for the caller alone")
    return Assign((_gradient(name, places),), parts[0] if len(parts) == 1 else Call("m.add", tuple(parts)))


def _gradient(name: str, places: Places) -> str:
    return f"d{places.name(name)}"
