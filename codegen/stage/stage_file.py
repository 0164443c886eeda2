"""A stage of the program as a Python file that a person could have written: a class with the names of its tensors, and
its `forward` (`stage_body.py`)."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from fxpipe.codegen.stage.backward_methods import (
    accumulating_names,
    backward_methods,
    forward_result,
    forward_stage,
    weight_places,
)
from fxpipe.codegen.stage.forward_signature import arguments, results
from fxpipe.codegen.stage.pair_methods import pair_methods
from fxpipe.codegen.stage.stage_body import body
from fxpipe.codegen.stage.stage_constants import constant_names, state_paths
from fxpipe.codegen.stage.stage_header import header
from fxpipe.codegen.stage.variables import assign
from fxpipe.codegen.text.line_layout import WIDTH, Brackets
from fxpipe.codegen.text.object_text import literal
from fxpipe.codegen.text.op_text import modules
from fxpipe.codegen.text.source_names import doc_prose, string
from fxpipe.codegen.text.statements import (
    BLANK,
    INSIDE,
    Assign,
    Block,
    Comment,
    Lines,
    Statement,
    apart,
    import_blocks,
    rows_of,
    text_of,
    tuple_of,
)
from fxpipe.ir.graph.opaque_call import Opaque, unsure
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.once import once
from fxpipe.ir.program.program import Program, RuntimeCall, Stage

MODULES = 4  # the most modules that a stage's title names


def emit_totals(program: Program) -> str:
    """The source of `totals.py`, which computes the totals of the whole batch. `program` has one stage."""
    title = "What each micro-batch has to know of the whole batch: computed once, before it is cut."
    return _emit(program, program.stages[0], "Totals", title, "")


def emit_epilogue(program: Program) -> str:
    """The source of `epilogue.py`, which runs on the joined micro-batches. `program` has one stage."""
    title = "What needs the whole batch: computed once, from what the micro-batches give, joined."
    return _emit(program, program.stages[0], "Epilogue", title, "")


def emit_stage(
    program: Program, index: int, notes: str = "", kinds: Collection[str] = (), beside: Sequence[int] = ()
) -> str:
    """The source of `stage<index>.py`. `notes` are facts for its header, such as measured times; `kinds` are the kinds
    of actions that the schedule has; `beside` the stages whose backward its forward runs beside."""
    stage = program.stages[index]
    title = f"Stage {index} of {len(program.stages)} on {doc_prose(stage.device)}."
    return _emit(program, stage, f"Stage{index}", title, notes, kinds, [program.stages[t] for t in beside])


def emit_device(program: Program, device: str, notes: Sequence[str]) -> str:
    """The source of a file for all stages of a device, which are many where ops are placed one by one: a class for
    each, with its header. `notes` has facts for each stage of the program."""
    n, stages = len(program.stages), [stage for stage in program.stages if stage.device == device]
    listed = ", ".join(str(stage.index) for stage in stages)
    title = f"What {doc_prose(device)} runs: of {n} stages {listed}. Each runs when what it takes has arrived."
    lines = [*textwrap.wrap(f'"""{title}"""', WIDTH), "", *_imports(program, stages)]
    for stage in stages:
        about = f"Stage {stage.index} of {n}{_modules(stage)}."
        docstring, code = _parts(program, stage, f"Stage{stage.index}", about, notes[stage.index], INSIDE)
        lines += [
            "",
            "",
            *text_of([Block(f"class Stage{stage.index}(Stage):", (Lines(tuple(docstring)), BLANK, *code))]),
        ]
    return "\n".join(lines) + "\n"


def _modules(stage: Stage) -> str:
    """The first `MODULES` modules of the model that the ops of a stage come from, and how many more there are."""
    found = list(dict.fromkeys(op.origin.module for op in stage.ops if op.origin.module))
    some, more = ", ".join(map(doc_prose, found[:MODULES])), len(found) - MODULES
    return (f": {some}" + (f" and {more} more" if more > 0 else "")) if found else ""


def _emit(
    program: Program,
    stage: Stage,
    name: str,
    title: str,
    notes: str,
    kinds: Collection[str] = (),
    beside: Sequence[Stage] = (),
) -> str:
    docstring, code = _parts(program, stage, name, title, notes, kinds=kinds, beside=beside)
    lines = text_of([Block(f"class {name}(Stage):", code)])
    return "\n".join([*docstring, "", *_imports(program, [stage], beside), "", "", *lines]) + "\n"


def _parts(
    program: Program,
    stage: Stage,
    name: str,
    title: str,
    notes: str,
    width: int = WIDTH,
    kinds: Collection[str] = (),
    beside: Sequence[Stage] = (),
) -> tuple[list[str], tuple[Statement, ...]]:
    """The docstring of a stage, in lines of up to `width` characters, and the body of its class."""
    needed = set(_needed(stage)).union(*map(_needed_backward, beside))
    taken = {module.partition(".")[0] for module in needed} | {name, *_runtime_names(program, stage, beside)}
    states, wider = state_paths(program, stage), forward_stage(stage)
    variables = assign(wider, program.types, states, taken, wider.gives[len(stage.gives) :])
    statements = body(program, wider, variables, returns=forward_result(stage, variables))
    head = Brackets("def forward(", ("self", *arguments(program, stage, variables)), f") -> {results(program, stage)}:")
    methods = [Block(head, statements), *backward_methods(program, stage, states, taken, kinds)]
    methods += pair_methods(program, stage, taken, beside)
    code = apart([_attributes(program, stage), *([method] for method in methods)])
    return header(program, stage, variables.of, title, notes, width), code


# The top of the file --------------------------------------------------------------------------------------------------


def _imports(program: Program, stages: Sequence[Stage], beside: Sequence[Stage] = ()) -> list[str]:
    signature = [program.types[name] for stage in stages for name in (*stage.takes, *stage.borrows, *stage.gives)]
    tensor = ["from torch import Tensor"] if any(isinstance(kind, TensorType) for kind in signature) else []
    names = sorted(
        {name for stage in stages for name in _runtime_names(program, stage, beside)},
        key=lambda name: (name.islower(), name),
    )
    needed = {module for stage in stages for module in _needed(stage)}.union(*map(_needed_backward, beside))
    lines = import_blocks(needed, tensor, [f"from fxpipe.runtime import {', '.join(names)}"])
    if not any(stage.backward for stage in stages):
        return lines
    standard = lines.index("") if lines[0].removeprefix("import ") in sys.stdlib_module_names else 0
    return [*lines[:standard], "from typing import Any", *([""] if not standard else []), *lines[standard:]]


@once
def _needed(stage: Stage) -> Collection[str]:
    """The modules that the code of a stage names."""
    found = {module for op in stage.ops for module in modules(op)} | {"torch" for op in stage.ops if op.regions}
    return found | _needed_backward(stage)


def _needed_backward(stage: Stage) -> set[str]:
    """The modules that the backward of a stage names."""
    ops = stage.backward.ops if stage.backward else ()
    return {module for op in ops for module in modules(op)} | {"torch" for op in ops if op.regions}


def _runtime_names(program: Program, stage: Stage, beside: Sequence[Stage]) -> list[str]:
    """The names that the file imports from fxpipe.runtime: classes, then functions."""
    draws = ["Draws"] if any(op.random for op in stage.ops) else []
    adding = {name for each in (stage, *beside) for name in accumulating_names(program, each)}
    ops = [*stage.ops, *(op for each in (stage, *beside) if each.backward for op in each.backward.ops)]
    return [*draws, "Stage", *sorted({op.target.name for op in ops if isinstance(op.target, RuntimeCall)} | adding)]


@once
def _unsure(program: Program) -> frozenset[str]:
    """The ops of all stages of which only a run tells whether they need a gradient."""
    return frozenset(unsure(op for stage in program.stages for op in stage.ops))


def _of_whole(called: Mapping[str, Opaque]) -> Iterator[Statement]:
    """What the runtime must know of what is called whole: what methods use, and the lists that are returned."""
    uses = {path: sorted(opaque.uses) for path, opaque in called.items() if opaque.uses is not None}
    if uses:
        yield from rows_of("uses", (tuple_of((string(path), literal(tuple(used)))) for path, used in uses.items()))
    lists = {
        (path, tuple(sorted(promise.without)), tuple(sorted(promise.joined)))
        for path, opaque in called.items()
        for promise in opaque.promises
        if promise.without
    }
    if lists:
        yield from rows_of("lists", (tuple_of((string(at), literal(a), literal(b))) for at, a, b in sorted(lists)))


def _attributes(program: Program, stage: Stage) -> list[Statement]:
    """The class attributes that tell the runtime which tensors the stage holds."""
    states = {name: program.state(name) for name in (*stage.states, *stage.mutates, *stage.rereads)}
    constants = constant_names(program)
    held = [name for name in stage.states if name not in constants]
    lists: dict[str, Iterable[str]] = {
        "states": [states[name].held for name in held],
        "constants": [constants[name] for name in stage.states if name in constants],
        "mutates": [states[name].path for name in stage.mutates],
        "rereads": [states[name].path for name in stage.rereads],
        "opaque": dict.fromkeys(op.target.called for op in stage.ops if isinstance(op.target, Opaque)),
    }
    found = [statement for name, paths in lists.items() for statement in rows_of(name, map(string, paths))]
    found += _of_whole({op.target.called: op.target for op in stage.ops if isinstance(op.target, Opaque)})
    parts = [states[name] for name in held if states[name].part]
    if parts:
        found.append(Comment("parts of the model's tensors: of each the ranges in its dimensions"))
        found += rows_of("parts", (tuple_of((string(s.held), string(s.path), literal(s.part))) for s in parts))
    if not _unsure(program).isdisjoint(op.name for op in stage.ops):
        found.append(Assign(("unsure",), "True", "whether what it gives needs a gradient is known once it has run"))
    if any(isinstance(op.target, Opaque) and op.target.derives for op in stage.ops):
        found.append(Assign(("derives",), "True", "autograd runs inside of forward, and needs a graph there"))
    if stage.backward is not None:
        paths = {name: string(constants[name] if name in constants else states[name].held) for name in stage.states}
        found.append(Assign(("graded",), tuple_of(weight_places(stage, paths)), "of which backward returns gradients"))
        if not all(gradient for _, gradient in stage.backward.roots):
            arrives = tuple_of(str(bool(gradient)) for _, gradient in stage.backward.roots)
            found.append(Assign(("arrives",), arrives, "for which of its results a gradient comes back"))
        if stage.backward.orders:
            found.append(Comment("for each argument, the dimensions in the order of memory; (): contiguous"))
            found += rows_of("orders", (tuple_of(map(str, order)) for order in stage.backward.orders))
        if stage.backward.reaches:
            found.append(Comment("for each gradient that backward returns, those that arrive and that it depends on"))
            found += rows_of("reaches", (tuple_of(map(str, places)) for places in stage.backward.reaches))
    return found
