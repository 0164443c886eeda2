"""The scheduler of a program that is trained in one go, as a Python file: a row of actions for each worker, and for
each stage what an action takes, computes and sends.

    class Scheduler(Stepper):
        rows                                      the schedule
        forward_1(m, i)                           stage 1 on micro-batch i
        backward_1(m, i)                          or in two halves:
        input_gradient_1(m, i), weight_gradient_1(m, i)

Micro-batches are not unrolled, so the file grows with the stages, and only the rows with the micro-batches.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby

from fxpipe.codegen.attributes import apart, attributes, differentiable, keep_dead_ends, row
from fxpipe.codegen.clock import portals, recomputed
from fxpipe.codegen.constants import constant_names
from fxpipe.codegen.lines import INDENT, WIDTH, Brackets, layout
from fxpipe.codegen.loans import owned, reason
from fxpipe.codegen.names import clip, doc_prose, prose, string
from fxpipe.codegen.places import Places
from fxpipe.codegen.statements import assign
from fxpipe.codegen.wires import lent_name
from fxpipe.ir.plan import Plan
from fxpipe.ir.program import Program, Stage, recut
from fxpipe.ir.schedule import Schedule, plain, show
from fxpipe.ir.units import count

TAKEN = frozenset(("self", "m", "i", "draw", "forward"))  # what the methods themselves call things


def emit_steps(program: Program, schedule: Schedule, plan: Plan, totals: Program | None = None) -> str:
    """The source of `scheduler.py`. The rows of `schedule` are the program's devices in order of first appearance;
    `totals`, of one stage, computes what the micro-batches must know of the whole batch."""
    program = keep_dead_ends(program)
    places = Places(program)
    kinds = {action.kind for action in schedule.place}
    replicated = any(stage.replicas for stage in program.stages)
    base = "Replicated" if replicated else "Stepper"
    head = [*attributes(program, places, base, totals), *_attributes(program, places, schedule)]
    offloaded = tuple(str(index) for index, stage in enumerate(plan.stages) if stage.offload)
    if offloaded:
        head += ["", f"{INDENT}# stages whose activations wait in host memory"]
        head += layout(Brackets("offloaded = (", offloaded, ")", "literal"), 1)
    blocks = [head, _lend(program)]
    for stage in program.stages:
        rule = f"{INDENT}# stage {stage.index}, {prose(stage.device)} "
        methods = [_forward(stage, places), *_backward(stage, places, kinds)]
        blocks.append([rule + "-" * (WIDTH - len(rule)), "", *apart(methods)])
    body = apart(blocks)
    draws = ["from fxpipe.runtime import Draws"] if any("Draws(" in line for line in body) else []
    file = "replicas" if replicated else "stepper"
    imports = [f"from fxpipe.engines.{file} import {', '.join(sorted((base, 'Step')))}", *draws]
    return "\n".join([*_docstring(program, schedule), "", *imports, "", "", *body]) + "\n"


# The top of the file --------------------------------------------------------------------------------------------------


def _docstring(program: Program, schedule: Schedule) -> list[str]:
    """The schedule as a grid, and how to read it."""
    labels = tuple(dict.fromkeys(program.devices))
    grid = show(schedule, labels).splitlines()[1:]
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


def _attributes(program: Program, places: Places, schedule: Schedule) -> list[str]:
    feeds = [
        row(places.name(name), stage.index)
        for stage in program.stages
        for name in stage.takes
        if _fed(name, stage, places)
    ]
    gradients = [f"({_places(stage.takes, program)}, {_places(stage.gives, program)})" for stage in program.stages]
    lines = layout(Brackets("feeds = (", tuple(feeds), ")", "literal"), 1) if feeds else []
    cuts = [
        row(places.name(move.value), move.source, move.target, move.dim)
        for move in program.moves
        if recut(move, program)
    ]
    if cuts:
        lines += [
            f"{INDENT}# values that other numbers of replicas cut in another way: from, to, dimension of the samples"
        ]
        lines += layout(Brackets("cuts = (", tuple(cuts), ")", "literal"), 1)
    lines += [f"{INDENT}# of each stage, the places of what it takes and of what it gives that have a gradient"]
    lines += layout(Brackets("gradients = (", tuple(gradients), ")", "literal"), 1)
    loss = next((output for output in program.graph.outputs if output.value == program.graph.loss), None)
    if loss is not None and loss.reduce is not None:
        lines += [f"{INDENT}loss_reduce = {string(loss.reduce)}"]
    labels = tuple(dict.fromkeys(program.devices))
    width = max(map(len, labels)) + 2
    lines += [f"{INDENT}schedule = {string(schedule.name)}", f'{INDENT}rows = """']
    bare = plain(schedule)
    for label, actions in zip(labels, schedule.devices, strict=True):
        text = " ".join(action.short if bare else str(action) for action in actions)
        first, rest = INDENT + label.ljust(width), INDENT + " " * width
        lines += textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest)
    return [*lines, f'{INDENT}"""']


def _places(names: Sequence[str], program: Program) -> str:
    found = [str(place) for place, name in enumerate(names) if differentiable(name, program)]
    return f"({', '.join(found)}{',' if len(found) == 1 else ''})"


def _lend(program: Program) -> list[str]:
    """The method that lends tensors from one stage to another, once a step."""
    if not program.loans:
        return []
    constants = constant_names(program)
    lines = [f"{INDENT}def lend(self, m: Step) -> None:"]
    for (_, user), alike in groupby(program.loans, key=lambda loan: (loan.home, loan.user)):
        loans = list(alike)
        lines.append(reason(program, loans, [user]))
        for loan in loans:
            call = Brackets("m.lend(", (str(user), owned(program, loan, constants)), ")")
            lines += assign([f"m.lent.{lent_name(loan)}"], call, 2)
    return lines


# Forward --------------------------------------------------------------------------------------------------------------


def _forward(stage: Stage, places: Places) -> list[str]:
    j, program = stage.index, places.program
    lines = [f"{INDENT}def forward_{j}(self, m: Step, i: int) -> None:"]
    arriving = [name for name in stage.takes if (name, j) in places.sources]
    if arriving:
        lines += _sources(stage, places)
        messages = (str(j), "i", *(string(places.name(name)) for name in arriving))
        lines += assign([_variable(name, places) for name in arriving], Brackets("m.receive(", messages, ")"), 2)
    draw = any(op.random for op in stage.ops)
    if draw:
        lines.append(f"{INDENT * 2}draw = Draws(m.seed, i, m.stages[{j}].device)")
    loans = {loan.state: loan for loan in program.loans if loan.user == j}
    takes = (_variable(name, places) if name in arriving else f"m[i].{places.name(name)}" for name in stage.takes)
    borrowed = (f"m.lent.{lent_name(loans[name])}" for name in stage.borrows)
    args = (str(j), "i", *takes, *borrowed, *(("draw",) if draw else ()))
    call = "m.forward("
    if stage.checkpoint == "always":
        lines.append(f"{INDENT * 2}# computed again in backward, unless it follows at once")
        call = "m.forward_to_recompute("
    elif stage.checkpoint == "except_last":
        lines.append(f"{INDENT * 2}# all but the last are computed again in backward, unless it follows at once")
        lines.append(f"{INDENT * 2}forward = m.forward if i == m.last else m.forward_to_recompute")
        call = "forward("
    lines += assign([_variable(name, places) for name in stage.gives], Brackets(call, args, ")"), 2)
    for name in stage.gives:
        for target in _targets(name, stage, program):
            if target == len(program.stages):
                place = f"m[i].{places.name(name)}"
                lines += layout(f"{place} = {_variable(name, places)}.detach()", 2)
            else:
                args = (str(j), "i", str(target), string(places.name(name)), _variable(name, places))
                lines += layout(Brackets("m.send(", args, ")"), 2)
    return lines


def _sources(stage: Stage, places: Places) -> list[str]:
    """A comment: where what the stage takes comes from."""
    sources = dict.fromkeys(places.sources[name, stage.index] for name in stage.takes if not _own(name, stage, places))
    if set(sources) <= {-1}:
        return []
    known = (f"stage {source}" if source >= 0 else "the batch" for source in sources)
    return [f"{INDENT * 2}# from {', '.join(known)}"]


def _own(name: str, stage: Stage, places: Places) -> bool:
    """Whether the value is a size, which every stage knows."""
    return (name, stage.index) not in places.sources


def _fed(name: str, stage: Stage, places: Places) -> bool:
    return places.sources.get((name, stage.index)) == -1


def _targets(name: str, stage: Stage, program: Program) -> list[int]:
    """The stages that the value goes to, the caller last."""
    return sorted(move.target for move in program.moves if move.value == name and move.source == stage.index)


def _variable(name: str, places: Places) -> str:
    variable = places.name(name)
    return f"{variable}_" if variable in TAKEN else variable


# Backward -------------------------------------------------------------------------------------------------------------


def _backward(stage: Stage, places: Places, kinds: Iterable[str]) -> list[list[str]]:
    """The methods for the kinds of actions that the schedule has."""
    j, methods = stage.index, []
    for kind, method in (("B", "backward"), ("I", "input_gradient")):
        if kind in kinds:
            head = f"{INDENT}def {method}_{j}(self, m: Step, i: int) -> None:"
            methods.append([head, *_gradients(stage, places, f"m.{method}(")])
    if "W" in kinds:
        head = f"{INDENT}def weight_gradient_{j}(self, m: Step, i: int) -> None:"
        methods.append([head, f"{INDENT * 2}m.weight_gradient({j}, i)"])
    return methods


def _gradients(stage: Stage, places: Places, call: str) -> list[str]:
    """Gradients of what the stage gives arrive, those of what it takes leave."""
    j, program = stage.index, places.program
    lines = [f"{INDENT * 2}m.recompute({j}, i)  # while the gradients are on their way"]
    if stage.checkpoint == "never":
        lines = []
    roots = []
    for place, name in enumerate(stage.gives):
        if differentiable(name, program):
            lines += _root(name, place, stage, places)
            roots.append(_gradient(name, places))
    takes = [name for name in stage.takes if differentiable(name, program)]
    sent = [name for name in takes if places.sources[name, j] >= 0]
    found = [_gradient(name, places) if name in sent else "_" for name in takes]
    lines += assign(found if sent else [], Brackets(call, (str(j), "i", *roots), ")"), 2)
    for name in sent:
        args = (str(j), "i", str(places.sources[name, j]), string(_message(name, j, places)), _gradient(name, places))
        lines += layout(Brackets("m.send_gradient(", args, ")"), 2)
    return lines


def _root(name: str, place: int, stage: Stage, places: Places) -> list[str]:
    """The gradient of a value that the stage gives: the sum of what comes from all who take it."""
    j, program = stage.index, places.program
    targets = [target for target in _targets(name, stage, program) if target < len(program.stages)]
    variable, lines = _gradient(name, places), []
    messages = tuple(string(_message(name, target, places)) for target in targets)
    received = Brackets("m.receive(", (str(j), "i", *messages), ")")
    root = f"m.root({j}, i, {place})"
    if name == program.graph.loss:
        lines += assign([variable], root, 2)
        if targets:
            parts = [f"{variable}_from_{target}" for target in targets]
            lines += assign(parts, received, 2)
            lines += assign([variable], Brackets("m.add(", (variable, *parts), ")"), 2)
    elif not targets:
        lines += [f"{INDENT * 2}{variable} = None  # for the caller alone"]
    elif len(targets) == 1:
        lines += assign([variable], received, 2)
    else:
        parts = [f"{variable}_from_{target}" for target in targets]
        lines += assign(parts, received, 2)
        lines += assign([variable], Brackets("m.add(", tuple(parts), ")"), 2)
    return lines


def _message(name: str, user: int, places: Places) -> str:
    return f"gradient of {places.name(name)} from stage {user}"


def _gradient(name: str, places: Places) -> str:
    return f"d{places.name(name)}"
