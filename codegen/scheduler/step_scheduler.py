"""The scheduler of a program for whole training steps, as a Python file: a row of actions for each worker, and for each
stage what an action takes, computes and sends.

    class Scheduler(StepScheduler):
        rows                                      the schedule
        forward_1(m, i)                           stage 1 on micro-batch i
        backward_1(m, i)                          or in two halves:
        input_gradient_1(m, i), weight_gradient_1(m, i)
        forward_1_beside_backward_2(m, i, j)      an overlapped pair

Micro-batches are not unrolled, so the file grows with the stages, and only the rows with the micro-batches.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from fxpipe.codegen.scheduler.schedule_grid import portals, recomputed
from fxpipe.codegen.scheduler.scheduler_class import attributes, differentiable, draws, lend, row, section
from fxpipe.codegen.scheduler.value_locations import Places
from fxpipe.codegen.text.line_layout import INDENT, WIDTH, Brackets, prefix
from fxpipe.codegen.text.source_names import clip, doc_prose, prose, quoted, string
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
    tuple_of,
)
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.plan.plan import FORWARD_AGAIN, Plan
from fxpipe.ir.program.device_programs import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from fxpipe.ir.program.program import Move, Program, Stage, recut
from fxpipe.ir.program.transfers import BACK
from fxpipe.ir.program.whole_batch import ALONE, WholeBatch
from fxpipe.ir.schedule.schedule import Schedule, cell, partners, plain, show
from fxpipe.ir.units import count

TAKEN = frozenset(("self", "m", "i", "j", "draw", "forward"))  # names that the methods use themselves


def emit_steps(program: Program, schedule: Schedule, plan: Plan, whole: WholeBatch = ALONE) -> str:
    """The source of `scheduler.py`. The rows of `schedule` are the program's devices in order of first appearance;
    `whole` runs on the whole batch."""
    places = Places(program)
    kinds = {action.kind for action in schedule.place}
    replicated = any(stage.replicas for stage in program.stages)
    base, file = (
        ("ReplicatedScheduler", "local.replica_step") if replicated else ("StepScheduler", "common.step_engine")
    )
    offloaded = rows_of("offloaded", (str(index) for index, stage in enumerate(plan.stages) if stage.offload))
    head = [*attributes(program, places, whole), *_attributes(program, places, schedule)]
    if offloaded:
        head += [BLANK, Comment("stages whose activations wait in host memory"), *offloaded]
    sections = [
        section(
            s,
            (
                _forward(s, places),
                *_backward(s, places, kinds),
                *(_pair(s, program.stages[t], places) for t in partners(schedule, s.index)),
            ),
        )
        for s in program.stages
    ]
    body = apart([head, lend(program, places, "Step"), *sections])
    imports = [f"from fxpipe.engines.{file} import {', '.join(sorted(('Gradients', base, 'Step')))}"]
    if schedule.pairs:
        imports.insert(0, "from fxpipe.engines.common.overlapped_pair import forward_beside_backward")
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
    if schedule.pairs:
        order += " A forward with a + and the backward behind it are one action."
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
    if program.collectives:
        yield Comment(
            "collectives of ranks, for values and their gradients: kind, and of each rank the value, from, to"
        )
        yield from rows_of("collectives", (
            tuple_of([string(one.kind), *(row(places.name(m.value), m.source, m.target) for m in one.moves)])
            for one in program.collectives
        ))  # fmt: skip
    yield Comment("of each stage, what of its arguments and of its results has a gradient, and its place there")
    yield from rows_of("gradients", (_graded(stage, places) for stage in program.stages))
    loss = next((output for output in program.graph.outputs if output.value == program.graph.loss), None)
    if loss is not None and loss.reduce is not None:
        yield Assign(("loss_reduce",), string(loss.reduce))
    if program.graph.trains_epilogue:
        yield Assign(("trained",), string(places.name(program.graph.loss or "")))
    yield Assign(("schedule",), string(schedule.name))
    labels = [quoted(label) for label in dict.fromkeys(program.devices)]
    width, bare = max(map(len, labels)) + 2, plain(schedule)
    lines = ['rows = """']
    for label, actions in zip(labels, schedule.devices, strict=True):
        text = " ".join(cell(schedule, action, bare) for action in actions)
        lines += textwrap.wrap(text, INSIDE, initial_indent=label.ljust(width), subsequent_indent=" " * width)
    yield Lines((*lines, '"""'))


def _graded(stage: Stage, places: Places) -> Brackets:
    def found(names: Sequence[str]) -> Brackets:
        graded = ((at, name) for at, name in enumerate(names) if differentiable(name, places.program))
        return Brackets("{", tuple(f"{string(places.name(name))}: {at}" for at, name in graded), "}", "literal")

    return Brackets("Gradients(", (prefix("takes=", found(stage.takes)), prefix("gives=", found(stage.gives))), ")")


# Forward --------------------------------------------------------------------------------------------------------------


def _forward(stage: Stage, places: Places) -> Block:
    j = stage.index
    taken, args = _taken(stage, places)
    body, forward = list(taken), "m.forward"
    if stage.checkpoint == "always":
        body.append(Comment("computed again in backward; skipped when backward runs next"))
        forward = "m.forward_to_recompute"
    elif stage.checkpoint == "except_last":
        body.append(Comment("all but the last are computed again in backward; skipped when backward runs next"))
        body.append(Assign(("forward",), "m.forward if i == m.last else m.forward_to_recompute"))
        forward = "forward"
    body.append(Assign(_results(stage, places), Call(forward, (str(j), "i", *args))))
    return Block(f"def forward_{j}(self, m: Step, i: int) -> None:", (*body, *_sent(stage, places)))


def _taken(stage: Stage, places: Places) -> tuple[tuple[Statement, ...], tuple[str, ...]]:
    """The statements that receive what the stage takes, and the arguments of its forward."""
    j = stage.index
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
    takes = (_variable(name, places) if name in arriving else f"m[i].{places.name(name)}" for name in stage.takes)
    return (*body, *draw), (*takes, *places.borrowed(stage), *(("draw",) if draw else ()))


def _results(stage: Stage, places: Places) -> tuple[str, ...]:
    return tuple(_variable(name, places) for name in stage.gives)


def _sent(stage: Stage, places: Places) -> Iterator[Statement]:
    """The statements that send what the stage gives."""
    j, program = stage.index, places.program
    for name in stage.gives:
        variable = _variable(name, places)
        for move in _moves(name, stage, program):
            if move.target == len(program.stages):
                detach = ".detach()" if isinstance(program.types[name], TensorType) else ""  # a number has no graph
                yield Assign((f"m[i].{places.name(name)}",), variable + detach)
            else:
                yield from _why(move, program)
                yield Call("m.send", (str(j), "i", string(places.name(move.value)), variable, f"to={move.target}"))


WHY = {
    ALL_REDUCE: "each has a part of {}, and all need the sum",
    REDUCE_SCATTER: "each has a part of {}, and needs a slice of the sum",
    ALL_GATHER: "each has a slice of {}, and all need the whole",
}


def _why(move: Move, program: Program, back: bool = False) -> list[Statement]:
    """What happens on the way from stage to stage, if that is not a move alone."""
    found = program.collective_of(move)
    if found is None:
        return []
    kind = BACK[found.kind] if back else found.kind
    ranks = ", ".join(program.stages[one.source].device.rpartition(":")[2] for one in found.moves)
    what = prose(move.value if found.kind == ALL_GATHER else move.given)
    why = WHY[kind].format(f"the gradient of {what}" if back else what)
    return [Comment(f"{kind} over ranks {ranks}: {why}")]


def _moves(name: str, stage: Stage, program: Program) -> list[Move]:
    """The moves of a value that the stage gives, that to the caller last."""
    found = (move for move in program.leaving[stage.index] if move.given == name)
    return sorted(found, key=lambda move: move.target)


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
    arriving, roots = _roots(stage, places)
    found, sent = _given(stage, places)
    call = Call(method, (str(stage.index), "i", *roots))
    return (*_recompute(stage), *arriving, Assign(found if sent else (), call), *sent)


def _recompute(stage: Stage, i: str = "i") -> tuple[Statement, ...]:
    if stage.checkpoint not in FORWARD_AGAIN:
        return ()
    return (Assign((), Call("m.recompute", (str(stage.index), i)), "while the gradients are on their way"),)


def _roots(stage: Stage, places: Places, i: str = "i", end: str = "") -> tuple[list[Statement], list[str]]:
    """The statements that receive the gradients of what the stage gives, and their variables, which end with `end`."""
    names = [name for name in stage.gives if differentiable(name, places.program)]
    return [_root(name, stage, places, i, end) for name in names], [_gradient(name, places) + end for name in names]


def _given(stage: Stage, places: Places, i: str = "i", end: str = "") -> tuple[tuple[str, ...], list[Statement]]:
    """The variables of the gradients of what the stage takes, and the statements that send them."""
    takes = [name for name in stage.takes if differentiable(name, places.program)]
    sent = [name for name in takes if places.sources[name, stage.index] >= 0]
    sends: list[Statement] = []
    for name in sent:
        to, value = f"to={places.sources[name, stage.index]}", string(places.name(name))
        arrives = (move for move in places.program.arriving[stage.index] if move.value == name)
        sends += _why(next(arrives), places.program, back=True)
        sends.append(Call("m.send_gradient", (str(stage.index), i, value, _gradient(name, places) + end, to)))
    return tuple(_gradient(name, places) + end if name in sent else "_" for name in takes), sends


def _root(name: str, stage: Stage, places: Places, i: str, end: str) -> Statement:
    """The gradient of a value that the stage gives: the sum of the gradients from all stages that take it."""
    program, own = places.program, (str(stage.index), i)
    variable = _gradient(name, places) + end
    moves = (move for move in _moves(name, stage, program) if move.target < len(program.stages))
    parts = [
        Brackets("m.receive_gradient(", (*own, string(places.name(move.value)), f"source={move.target}"), ")")
        for move in moves
    ]
    if name in program.graph.roots:
        root = "m.epilogue_gradient(" if program.graph.trains_epilogue else "m.root("
        parts.insert(0, Brackets(root, (*own, string(places.name(name))), ")"))
    if not parts:
        return Assign((variable,), "None", "for the caller alone")
    return Assign((variable,), parts[0] if len(parts) == 1 else Call("m.add", tuple(parts)))


def _gradient(name: str, places: Places) -> str:
    return f"d{places.name(name)}"


# Overlapped pairs -----------------------------------------------------------------------------------------------------


def _pair(stage: Stage, partner: Stage, places: Places) -> Block:
    """The forward of `stage` on micro-batch i beside the backward of `partner` on micro-batch j: both are sent when
    both are done."""
    taken, args = _taken(stage, places)
    used = {*_results(stage, places), *args}
    end = "_" * (not used.isdisjoint(_gradient(name, places) for name in (*partner.gives, *partner.takes)))
    arriving, roots = _roots(partner, places, "j", end)
    found, sent = _given(partner, places, "j", end)
    again = {"always": ("again=True",), "except_last": ("again=i != m.last",)}.get(stage.checkpoint, ())
    forward, backward = (_tuple(str(one.index), i, *rest) for one, i, rest in
                         ((stage, "i", args), (partner, "j", roots)))  # fmt: skip
    call = Call("forward_beside_backward", ("m", forward, backward, *again))
    results = (*_results(stage, places), *found)
    one = (f"[{results[0]}]",) if len(results) == 1 else results
    return Block(
        f"def forward_{stage.index}_beside_backward_{partner.index}(self, m: Step, i: int, j: int) -> None:",
        (*_recompute(partner, "j"), *taken, *arriving, Assign(one, call), *_sent(stage, places), *sent),
    )


def _tuple(*items: str) -> Brackets:
    return Brackets("(", items, ")", "literal")
