"""The scheduler of a program as a Python file: what runs before what, and how values get where they are used.

    class Scheduler(Pipeline):
        ready_1(m, i)     before stage 1 runs on micro-batch i: the order of backward, copies from other devices
        compute_1(m, i)   the stage, on its worker, and what can be let go afterwards

Micro-batches are a loop, in `Pipeline.run`, so the file grows with the stages alone. Between CPU workers nothing is
copied, and nothing about copies is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fxpipe.codegen.attributes import apart, attributes, differentiable, keep_dead_ends
from fxpipe.codegen.clock import docstring
from fxpipe.codegen.lines import INDENT, WIDTH, Brackets, layout
from fxpipe.codegen.loans import lend
from fxpipe.codegen.names import prose
from fxpipe.codegen.places import Places, torch_device
from fxpipe.codegen.statements import assign, delete
from fxpipe.ir.program import Program, Stage
from fxpipe.ir.types import TensorType

RUNTIME = ("Draws", "checkpoint", "copy", "fork", "join", "wait")  # what the methods may use of fxpipe.runtime


def emit_scheduler(program: Program, chunks: int, grid: str | None = None, totals: Program | None = None) -> str:
    """The source of `scheduler.py`. `grid` is the schedule as text; without it, GPipe's clock for `chunks`.
    `totals`, of one stage, computes what the micro-batches must know of the whole batch."""
    program = keep_dead_ends(program)
    places = Places(program)
    blocks = [attributes(program, places, "Pipeline", totals), lend(program, places)]
    for stage in program.stages:
        rule = f"{INDENT}# stage {stage.index}, {prose(stage.device)} "
        methods = [_ready(stage, places, chunks > 1), _compute(stage, places)]
        blocks.append([rule + "-" * (WIDTH - len(rule)), "", *apart(methods)])
    blocks.append(_gather(program, places))
    body = [*apart(blocks)]
    return "\n".join([*docstring(program, chunks, grid), "", *_imports(body), "", "", *body]) + "\n"


# The top of the file --------------------------------------------------------------------------------------------------


def _imports(body: Sequence[str]) -> list[str]:
    text = "\n".join(line for line in body if not line.lstrip().startswith("#"))
    used = [name for name in RUNTIME if re.search(rf"\b(?<!\.){name}\(", text)]
    local = ["from fxpipe.engines.local import Batches, Pipeline"]
    standard = ["from typing import Any", ""] if "Any" in text else []
    return [*standard, *local, *([f"from fxpipe.runtime import {', '.join(used)}"] if used else [])]


# Before a stage runs --------------------------------------------------------------------------------------------------


def _ready(stage: Stage, places: Places, ordered: bool) -> list[str]:
    """`ready_j`: copies from other devices, and the edge from micro-batch i to i - 1 where there are several."""
    # Copies come first: in backward they then go before the other micro-batch's work, and the neighbour waits less.
    fork, join = _order(stage, places) if ordered else ([], [])
    body = [*fork, *_opens(stage, places), *join]
    return [f"{INDENT}def ready_{stage.index}(self, m: Batches, i: int) -> None:", *body] if body else []


def _order(stage: Stage, places: Places) -> tuple[list[str], list[str]]:
    """The statements that make the token of micro-batch i - 1, and those that let micro-batch i take it in."""
    j = stage.index
    takes = [places.at(name, j) for name in stage.takes if differentiable(name, places.program)]
    gives = [
        places.at(name, j).replace("m[i]", "m[i - 1]") for name in stage.gives if differentiable(name, places.program)
    ]
    if not takes or not gives or stage.checkpoint == "always":
        return [], []  # Checkpoint takes the token itself; without a take there is nothing to join
    if stage.checkpoint == "except_last":
        token, condition = f"m.after[{j}]", "if m.grad and i == m.last:"
        why = f"# {prose(stage.device)} runs B(i), then F(i - 1) again, then B(i - 1)"
        fork = []
    else:
        token, condition = "token", "if m.grad and i > 0:"
        why = f"# {prose(stage.device)} runs B(i) before B(i - 1)"
        fork = assign([*gives, "token"], Brackets("fork(", tuple(gives), ")"), 3)
    join = assign(takes, Brackets("join(", (token, *takes), ")"), 3)
    head = [f"{INDENT * 2}{condition}", f"{INDENT * 3}{why}"]
    if any(places.arrives(name, j) for name in stage.takes) and fork:
        return [*head, *fork], [f"{INDENT * 2}{condition}", *join]
    return [], [*head, *fork, *join]


def _opens(stage: Stage, places: Places) -> list[str]:
    """Copies of what comes from other devices, by source."""
    j, lines = stage.index, []
    come = [name for name in stage.takes if places.arrives(name, j)]
    for name in come:
        if places.sources[name, j] < 0:
            lines += _input(stage, name, places)
    for source in sorted({places.sources[name, j] for name in come} - {-1}):
        for names in _alike([name for name in come if places.sources[name, j] == source], places):
            lines += _copy(stage, source, names, places)
    return lines


def _input(stage: Stage, name: str, places: Places) -> list[str]:
    """The copy of an input, which may be on any device. It waits for nothing."""
    j, here = stage.index, places.at(name, stage.index)
    args = ("None", f"self.streams[{j}, i]", f"self.stages[{j}].device", places.at(name, -1))
    lines = assign([here], Brackets("copy(", args, ")"), 2)
    lines += assign([here], _wait(j, [here]), 2)
    return lines + delete([places.at(name, -1)] if places.done_by_copy(name, -1, j) else [], 2)


def _wait(stage: int, here: Sequence[str]) -> Brackets:
    return Brackets("wait(", (f"m.compute[{stage}]", f"self.streams[{stage}, i]", *here), ")")


def _copy(stage: Stage, source: int, names: Sequence[str], places: Places) -> list[str]:
    j, devices = stage.index, places.program.devices
    there = [places.at(name, source) for name in names]
    here = [places.at(name, j) for name in names]
    long = any((source, j) == (move.source, move.target) for move in places.program.portals)
    past = f", past stage {' and '.join(map(str, range(source + 1, j)))}" if long else ""
    args = (f"self.streams[{source}, i]", f"self.streams[{j}, i]", f"self.stages[{j}].device", *there)
    lines = [f"{INDENT * 2}# {prose(devices[source])} -> {prose(devices[j])}{past}; the copy waits for F(i) alone"]
    lines += assign(here, Brackets("copy(", args, ")"), 2)
    if torch_device(devices[j]) != "cpu":
        lines += assign(here, _wait(j, here), 2)
    gone = [place for name, place in zip(names, there, strict=True) if places.done_by_copy(name, source, j)]
    return lines + delete(gone, 2)


# A stage runs ---------------------------------------------------------------------------------------------------------


def _compute(stage: Stage, places: Places) -> list[str]:
    """`compute_j`: the call, what leaves for other devices, and what is let go."""
    lines = [f"{INDENT}def compute_{stage.index}(self, m: Batches, i: int) -> None:"]
    args = _arguments(stage, places)
    if any(op.random for op in stage.ops):
        lines.append(f"{INDENT * 2}draw = Draws(m.seed, i, self.stages[{stage.index}].device)")
    if stage.checkpoint == "never":
        lines += _call(stage, args, places, 2)
    else:
        lines += _checkpointed(stage, args, places)
    lines += _sends(stage, places)
    gone = [places.at(name, stage.index) for name in stage.takes if places.done(name, stage.index)]
    return lines + delete(gone, 2, "  # used for the last time")


def _arguments(stage: Stage, places: Places) -> tuple[str, ...]:
    loans = {loan.state: loan for loan in places.program.loans if loan.user == stage.index}
    borrowed = (f"m.lent.{places.lent(loans[name])}" for name in stage.borrows)
    draw = ("draw",) if any(op.random for op in stage.ops) else ()
    return (*(places.at(name, stage.index) for name in stage.takes), *borrowed, *draw)


def _call(stage: Stage, args: tuple[str, ...], places: Places, depth: int) -> list[str]:
    gives = [places.at(name, stage.index) for name in stage.gives]
    return assign(gives, Brackets(f"self.stages[{stage.index}].forward(", args, ")"), depth)


def _checkpointed(stage: Stage, args: tuple[str, ...], places: Places) -> list[str]:
    """The call that keeps nothing for backward, and the plain one for where backward follows at once, or never."""
    j = stage.index
    gives = [places.at(name, j) for name in stage.gives]
    always = stage.checkpoint == "always"
    call = Brackets("checkpoint(", (f"self.stages[{j}]", f"({j}, i)", "m.context", f"m.after[{j}]", *args), ")")
    lines = [f"{INDENT * 2}if m.grad{'' if always else ' and i < m.last'}:"]
    lines += [
        f"{INDENT * 3}# {'every micro-batch is' if always else 'all micro-batches but the last are'} computed again"
    ]
    lines[-1] += " in backward"
    lines += assign([*(gives or ["_"]), f"m.after[{j}]"], call, 3)
    for name in stage.gives:
        if _looks_differentiable(name, places):
            place = places.at(name, j)
            lines += layout(f"{place} = {place}.detach()  # no gradient goes through it", 3)
    lines += [f"{INDENT * 2}else:", *_call(stage, args, places, 3)]
    given = [places.at(name, j) for name in stage.gives if differentiable(name, places.program)]
    if not always and given and not any(differentiable(name, places.program) for name in stage.takes):
        lines += [
            f"{INDENT * 3}# no input has a gradient, so the output takes the token: B(i), F(i - 1) again, B(i - 1)"
        ]
        lines += assign(given, Brackets("join(", (f"m.after[{j}]", *given), ")"), 3)
    return lines


def _sends(stage: Stage, places: Places) -> list[str]:
    """What leaves a GPU waits for this task, and for no later one, even if it is copied much later."""
    j = stage.index
    if torch_device(stage.device) == "cpu" or not any(places.leaves(name, j) for name in stage.gives):
        return []
    comment = f"{INDENT * 2}# what leaves {prose(stage.device)} may go once F(i) is done"
    return [comment, f"{INDENT * 2}self.streams[{j}, i].wait_stream(m.compute[{j}])"]


# After the last tick --------------------------------------------------------------------------------------------------


def _gather(program: Program, places: Places) -> list[str]:
    """The method that starts the recomputation of the last micro-batch, where it is recomputed."""
    always = [stage.index for stage in program.stages if stage.checkpoint == "always"]
    outputs = [output.value for output in program.graph.outputs if differentiable(output.value, places.program)]
    if not always or not outputs:
        return []
    place = f"m[m.last].{places.name(max(outputs, key=places.home))}"
    return [
        f"{INDENT}def gather(self, m: Batches) -> tuple[Any, ...]:",
        f"{INDENT * 2}# nothing runs after the last micro-batch: backward starts with computing it again",
        f"{INDENT * 2}for j in ({', '.join(map(str, always))}{',' if len(always) == 1 else ''}):",
        f"{INDENT * 3}{place} = join(m.after[j], {place})",
        f"{INDENT * 2}return super().gather(m)",
    ]


# Kinds of values -----------------------------------------------------------------------------------------------------


def _alike(names: Sequence[str], places: Places) -> Iterator[list[str]]:
    """The tensors with a gradient, and those without, which must not get one by being copied along."""
    tensors = [name for name in names if isinstance(places.program.types[name], TensorType)]
    for grad in (True, False):
        group = [name for name in tensors if differentiable(name, places.program) == grad]
        if group:
            yield group


def _looks_differentiable(name: str, places: Places) -> bool:
    """Whether the value has no gradient, but an element type that could have one."""
    kind = places.program.types[name]
    return isinstance(kind, TensorType) and not kind.grad and kind.dtype.startswith(("f", "bf", "c"))
