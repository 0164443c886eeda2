"""A stage of the program as a Python file that a person could have written.

    ops -> groups that come from one line of the user's -> statements -> lines

A comment with that line stands above each group; ops in the same region share one `with`; a large tensor that nobody
needs any more is let go with `del`. fx prints one flat list instead, with every release squeezed behind its statement.
"""

from __future__ import annotations

import math
import operator
import re
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, takewhile
from pathlib import PurePath

from fxpipe.codegen.expr import IN_PLACE_METHODS, EmitError, expression, in_place_sign, modules, subscript
from fxpipe.codegen.header import header
from fxpipe.codegen.imports import import_blocks
from fxpipe.codegen.lines import INDENT, WIDTH, Brackets, Doc, flat, layout, prefix
from fxpipe.codegen.names import STAGE_NAMES, clip, code_comment, doc_prose, identifier, prose, state_path, string
from fxpipe.codegen.spelling import Names, literal, nest
from fxpipe.codegen.variables import Variables, assign, rebinds
from fxpipe.ir.graph import Op, Origin, Ref, Region
from fxpipe.ir.opaque import Opaque
from fxpipe.ir.program import Program, RuntimeCall, Stage
from fxpipe.ir.types import TensorType, ValueType, tensors

LONG_PATH = 80  # characters from which on a path of the model is written in two steps
_OWNER = re.compile(r"(self\..*\]\.\w+|self\..*)((?:\.\w+)+)")  # up to the last index, if there is one; the rest
MODULES = 4  # as many of a stage's modules as its title names
LARGE = 1 << 16  # elements from which on letting go of a tensor is worth a line
VIEWS = frozenset((
    "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute",
    "swapaxes", "movedim", "t", "expand", "expand_as", "narrow", "select", "diagonal", "unfold", "detach", "chunk",
    "split", "unbind", "tensor_split", "getitem", "getattr", "contiguous", "to", "real", "imag",
))  # fmt: skip


def emit_totals(program: Program) -> str:
    """The source of `totals.py`: what micro-batches must know of the whole batch. `program` has one stage."""
    title = "What each micro-batch has to know of the whole batch: computed once, before it is cut."
    return _emit(program, program.stages[0], "Totals", title, "")


def emit_stage(program: Program, index: int, notes: str = "") -> str:
    """The source of `stage<index>.py`. `notes` are facts for its header, such as measured times."""
    stage = program.stages[index]
    title = f"Stage {index} of {len(program.stages)} on {doc_prose(stage.device)}."
    return _emit(program, stage, f"Stage{index}", title, notes)


def emit_device(program: Program, device: str, notes: Sequence[str]) -> str:
    """The source of a file for all stages of a device, which are many where ops are placed one by one: a class for
    each, with its header. `notes` has facts for each stage of the program."""
    n, stages = len(program.stages), [stage for stage in program.stages if stage.device == device]
    listed = ", ".join(str(stage.index) for stage in stages)
    title = f"What {doc_prose(device)} runs: of {n} stages {listed}. Each runs when what it takes has arrived."
    lines = [*textwrap.wrap(f'"""{title}"""', WIDTH), "", *_imports(program, stages)]
    for stage in stages:
        about = f"Stage {stage.index} of {n}{_modules(stage)}."
        inside = WIDTH - len(INDENT)
        docstring, code = _parts(program, stage, f"Stage{stage.index}", about, notes[stage.index], inside)
        indented = [f"{INDENT}{line}".rstrip() for line in docstring]
        lines += ["", "", f"class Stage{stage.index}(Stage):", *indented, "", *code]
    return "\n".join(lines) + "\n"


def _modules(stage: Stage) -> str:
    """The modules of the model that the ops of a stage come from, the first of them."""
    found = list(dict.fromkeys(op.origin.module for op in stage.ops if op.origin.module))
    some, more = ", ".join(map(doc_prose, found[:MODULES])), len(found) - MODULES
    return (f": {some}" + (f" and {more} more" if more > 0 else "")) if found else ""


def _emit(program: Program, stage: Stage, name: str, title: str, notes: str) -> str:
    docstring, code = _parts(program, stage, name, title, notes)
    return "\n".join([*docstring, "", *_imports(program, [stage]), "", "", f"class {name}(Stage):", *code]) + "\n"


def _parts(
    program: Program, stage: Stage, name: str, title: str, notes: str, width: int = WIDTH
) -> tuple[list[str], list[str]]:
    """The docstring of a stage, in lines of up to `width`, and what is in its class."""
    taken = {module.partition(".")[0] for module in _needed(stage)} | {name, *_runtime_names(stage)}
    variables = assign(stage, program.types, _paths(program, stage), taken)
    code = [
        *_attributes(program, stage),
        *_signature(program, stage, variables),
        *_body(program, stage, variables),
    ]
    return header(program, stage, variables.of, title, notes, width), code


def constant_names(program: Program) -> dict[str, str]:
    """The attribute that holds each constant of the program: its own name, where no part of the model is called so."""
    paths = (state.path for state in program.graph.states if state.kind != "constant")
    taken = set(STAGE_NAMES) | {path.partition(".")[0] for path in paths}
    names = {}
    for state in program.graph.states:
        if state.kind == "constant":
            name = identifier(state.name)
            while name in taken:
                name += "_"
            taken.add(name)
            names[state.name] = name
    return names


def _paths(program: Program, stage: Stage) -> dict[str, str]:
    """The source of each tensor that the stage owns."""
    constants = constant_names(program)
    states = {state.name: state for state in program.graph.states}
    return {
        name: f"self.{constants[name]}" if name in constants else state_path(states[name].held) for name in stage.states
    }


# The top of the file --------------------------------------------------------------------------------------------------


def _imports(program: Program, stages: Sequence[Stage]) -> list[str]:
    signature = [program.types[name] for stage in stages for name in (*stage.takes, *stage.borrows, *stage.gives)]
    tensor = ["from torch import Tensor"] if any(isinstance(kind, TensorType) for kind in signature) else []
    names = sorted(
        {name for stage in stages for name in _runtime_names(stage)}, key=lambda name: (name.islower(), name)
    )
    needed = {module for stage in stages for module in _needed(stage)}
    return import_blocks(needed, tensor, [f"from fxpipe.runtime import {', '.join(names)}"])


def _needed(stage: Stage) -> set[str]:
    """The modules that the code of a stage names."""
    return {module for op in stage.ops for module in modules(op)} | {"torch" for op in stage.ops if op.regions}


def _runtime_names(stage: Stage) -> list[str]:
    """What the file takes from fxpipe.runtime: classes, then functions."""
    draws = ["Draws"] if any(op.random for op in stage.ops) else []
    return [*draws, "Stage", *sorted({op.target.name for op in stage.ops if isinstance(op.target, RuntimeCall)})]


def _attributes(program: Program, stage: Stage) -> list[str]:
    """The class attributes that tell the runtime which tensors the stage holds."""
    states = {state.name: state for state in program.graph.states}
    constants = constant_names(program)
    held = [name for name in stage.states if name not in constants]
    lists = {
        "states": [states[name].held for name in held],
        "constants": [constants[name] for name in stage.states if name in constants],
        "mutates": [states[name].path for name in stage.mutates],
        "rereads": [states[name].path for name in stage.rereads],
        "opaque": dict.fromkeys(op.target.path for op in stage.ops if isinstance(op.target, Opaque)),
    }
    lines = [
        line
        for name, paths in lists.items()
        if paths
        for line in layout(prefix(f"{name} = ", Brackets("(", tuple(map(string, paths)), ")", "literal")), 1)
    ]
    parts = [states[name] for name in held if states[name].part]
    if parts:
        lines.append(f"{INDENT}# parts of the model's tensors: of each the ranges in its dimensions")
        rows = (Brackets("(", (string(s.held), string(s.path), literal(s.part)), ")", "literal") for s in parts)
        lines += layout(Brackets("parts = (", tuple(rows), ")", "literal"), 1)
    return [*lines, ""] if lines else []


def _signature(program: Program, stage: Stage, variables: Variables) -> list[str]:
    def typed(name: str) -> str:
        return f"{variables.of[name]}: {_annotation(program.types[name])}"

    arguments = ["self", *map(typed, stage.takes), *map(typed, stage.borrows)]
    arguments += ["draw: Draws"] if any(op.random for op in stage.ops) else []
    given = [_annotation(program.types[name]) for name in stage.gives]
    result = f"tuple[{', '.join(given)}]" if len(given) > 1 else given[0] if given else "None"
    if len(result) > WIDTH // 2:
        result = f"tuple[{' | '.join(sorted(set(given)))}, ...]"
    return layout(Brackets("def forward(", tuple(arguments), f") -> {result}:"), 1)


def _annotation(kind: ValueType) -> str:
    return "Tensor" if isinstance(kind, TensorType) else str(kind)


# The body -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """One op of the stage with its statements, and the variables to let go of after it. `group` counts, along the
    stage, the lines of the user's that ops come from."""

    op: Op
    statements: tuple[Doc, ...]
    releases: tuple[str, ...]
    group: int


def _body(program: Program, stage: Stage, variables: Variables) -> list[str]:
    steps = _steps(program, stage, variables)
    comments = _comments(steps)
    lines: list[str] = []
    shown = -1
    for regions, run in groupby(steps, key=lambda step: step.op.regions):
        block = list(run)
        depth, top = 2, not lines
        if regions:
            if block[0].group == block[-1].group != shown:  # one line of the user's: it stands above the `with`
                shown = block[0].group
                lines += _comment(comments[shown], depth, top)
            elif block[0].group != shown and not top:
                lines.append("")
            lines += layout(_with(regions, block[0].op), depth)
            depth, top = 3, True
        for step in block:
            if step.group != shown:
                shown = step.group
                lines += _comment(comments[shown], depth, top)
            lines += _step_lines(step, depth)
            top = False
    return [*lines, *_return(stage, variables)]


def _step_lines(step: _Step, depth: int) -> list[str]:
    """The statements; those that draw random numbers in a block that seeds them."""
    inner = depth + 1 if step.op.random else depth
    lines = []
    if isinstance(step.op.target, Opaque):
        lines += [clip(f"{INDENT * depth}# opaque: {_origin(step.op.target.origin, '')}", WIDTH)]
    lines += [f"{INDENT * depth}with draw({step.op.draw}):"] if step.op.random else []
    lines += [line for statement in step.statements for line in layout(statement, inner)]
    lines += layout(Brackets("del ", step.releases, "", "bare"), depth) if step.releases else []
    return lines


def _return(stage: Stage, variables: Variables) -> list[str]:
    given = tuple(variables.of[name] for name in stage.gives)
    if not given:
        return [] if stage.ops else layout("pass", 2)
    return layout(Brackets("return ", given, "", "bare") if len(given) > 1 else f"return {given[0]}", 2)


def _steps(program: Program, stage: Stage, variables: Variables) -> list[_Step]:
    releases = _releases(stage, variables, program.types)
    ops = [op for op in stage.ops if op.name not in variables.folded]
    lines = [(op.origin.file, op.origin.line, op.origin.code) for op in ops]
    groups = list(accumulate((new != old for old, new in pairwise(lines)), initial=0))
    taken = {text.partition(".")[0] for text in variables.of.values()}
    return [
        _Step(op, tuple(_statements(op, variables, taken)), releases[op.name] if group < groups[-1] else (), group)
        for op, group in zip(ops, groups, strict=False)
    ]


# Comments and regions -------------------------------------------------------------------------------------------------


def _comments(steps: Sequence[_Step]) -> list[str]:
    """For each group, the user's file, line, module and code."""
    texts = []
    for _, run in groupby(steps, key=lambda step: step.group):
        ops = [step.op for step in run]
        texts.append(_origin(ops[0].origin, _common([op.origin.module for op in ops])))
    return texts


def _common(paths: Sequence[str]) -> str:
    """The module that all of these are in."""
    parts = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts))


def _origin(origin: Origin, module: str) -> str:
    place = f"{PurePath(origin.file).name.replace(' ', '_')}:{origin.line}" if origin.file else ""
    return "  ".join(part for part in (prose(place), prose(module), code_comment(origin.code)) if part)


def _comment(text: str, depth: int, top: bool) -> list[str]:
    """The comment line, after an empty line unless it opens a block."""
    line = clip(f"{INDENT * depth}# {text}", WIDTH) if text else None
    return [*([] if top else [""]), *([line] if line else [])]


def _with(regions: Sequence[Region], op: Op) -> Doc:
    return Brackets("with ", tuple(_context(region, op) for region in regions), ":", "bare")


def _context(region: Region, op: Op) -> Doc:
    if region.kind == "grad":
        return "torch.enable_grad()" if region.args[0] else "torch.no_grad()"
    if region.kind == "autocast":
        device, dtype, enabled, cache = region.args
        options = {"dtype": dtype, "enabled": None if enabled else False, "cache_enabled": cache}
        given = (prefix(f"{key}=", literal(value)) for key, value in options.items() if value is not None)
        return Brackets("torch.autocast(", (literal(device), *given), ")")
    raise EmitError(f"no context is known for the region {region} of the op {op.name!r}, at {op.origin}")


# Statements -----------------------------------------------------------------------------------------------------------


def _statements(op: Op, variables: Variables, taken: Collection[str]) -> Iterator[Doc]:
    """`x = f(y)`, or what Python has for an op that changes its first argument. Where a path of the model is too long,
    the module that holds the tensor gets a variable first, of a name that is not `taken`."""
    modules: dict[str, str] = {}
    paths: dict[str, str] = {}
    for path in _long_paths(op, variables):
        owner, rest = _OWNER.fullmatch(path).groups()  # type: ignore[union-attr]
        if owner not in modules:
            name = identifier(re.findall(r"\w+", owner)[-1])
            while name in taken or name in modules.values():
                name += "_"
            modules[owner] = name
            yield f"{name} = {owner}"
        paths[path] = modules[owner] + rest
    yield from _statement(op, variables, lambda name: paths.get(variables.of[name], variables.of[name]))


def _long_paths(op: Op, variables: Variables) -> list[str]:
    """The model's tensors whose path is too long for the op's statement: on its own, or as what is indexed or called
    when the statement has to be broken."""
    if isinstance(op.target, Opaque):  # which has its tensors already
        return []
    used = [variables.of[name] for name in dict.fromkeys(op.reads)]
    paths = [path for path in used if _OWNER.fullmatch(path)]
    first = variables.of[op.args[0].name] if op.args and isinstance(op.args[0], Ref) else ""
    if first in paths and "[" in first and (isinstance(op.target, str) or op.target is operator.getitem):
        statement = _statement(op, variables, variables.of.__getitem__)
        if any(len(flat(doc)) > WIDTH - 3 * len(INDENT) for doc in statement):
            return paths
    return [path for path in paths if len(path) > LONG_PATH]


def _statement(op: Op, variables: Variables, names: Names) -> Iterator[Doc]:
    if not rebinds(op):
        yield _assignment(op, variables, names)
        return
    owner, sign = names(op.args[0].name), in_place_sign(op)
    if op.target is operator.setitem:
        yield prefix(f"{flat(subscript(owner, op.args[1], names))} = ", nest(op.args[2], names))
    elif sign and owner.isidentifier():
        yield prefix(f"{owner} {sign} ", nest(op.args[1], names))
    elif sign:  # `self.count += 1` would set the attribute; the tensor itself is meant
        yield Brackets(f"{owner}.{IN_PLACE_METHODS[sign]}(", (nest(op.args[1], names),), ")")
    else:
        yield expression(op, names)
    if names(op.name) != owner:
        yield f"{names(op.name)} = {owner}"


def _assignment(op: Op, variables: Variables, names: Names) -> Doc:
    written = expression(op, names)
    targets = [names(name) for name in variables.unpacked.get(op.name, (op.name,)) if name in variables.of]
    if targets:
        return prefix(f"{', '.join(targets)} = ", written)
    is_call = isinstance(written, Brackets) and written.kind == "call"
    return written if is_call else prefix("_ = ", written)  # an operator alone would look like a slip


def _releases(stage: Stage, variables: Variables, types: Mapping[str, ValueType]) -> dict[str, tuple[str, ...]]:
    """After each op, the variables whose large tensors nobody needs any more, unless a statement soon to come gives
    the variable to another tensor. What the stage takes is held by the caller; letting go of it here frees nothing."""
    dying: dict[float, list[str]] = defaultdict(list)
    for name, position in variables.last_use.items():
        dying[position].append(name)
    bound = {position: _bound(op, variables) for position, op in enumerate(stage.ops)}
    made = defaultdict(int, {op.name: position for position, op in enumerate(stage.ops)})
    holder: dict[str, str] = {}  # the value that each variable holds
    shared: dict[str, list[str]] = defaultdict(list)  # for a view, the values whose memory it keeps alive
    releases = {}
    for position, op in enumerate(stage.ops):
        holder |= bound[position]
        soon = {name for later in range(position, position + 3) for name in bound.get(later, ())}
        gone = []
        for name in dying[position]:
            memory = [*shared.pop(name, ()), name]
            if _shares_memory(op, name):
                shared[op.name] += memory
            elif _is_large(types[name]):
                gone += memory
        names = ((variables.of.get(value, ""), value) for value in sorted(gone, key=made.__getitem__))
        releases[op.name] = tuple(name for name, value in names if holder.get(name) == value and name not in soon)
    return releases


def _shares_memory(op: Op, name: str) -> bool:
    """Whether the op's result may be a view of the value, so that letting go of the value frees nothing yet."""
    if name in op.writes:
        return True
    called = op.target if isinstance(op.target, str) else getattr(op.target, "__name__", "")
    return called in VIEWS and bool(op.args) and op.args[0] == Ref(name)


def _bound(op: Op, variables: Variables) -> dict[str, str]:
    """The variables that the op's statement sets, with the values they then hold."""
    values = variables.unpacked.get(op.name, (op.name,)) if op.name not in variables.folded else ()
    return {variables.of[name]: name for name in values if name in variables.of}


def _is_large(kind: ValueType) -> bool:
    """Sizes that depend on the batch count as large: a micro-batch is what memory goes into."""
    return any(
        any(isinstance(dim, str) for dim in item.shape) or math.prod(map(int, item.shape)) >= LARGE
        for item in tensors(kind)
    )
