"""A program as the files of a Python package, and how they are saved.

    stage0.py ... stageN.py   the code of each stage; device0.py ... deviceN.py if devices have many stages
    scheduler.py              when stages run, and what moves between them
    plan.json                 the plan
    __init__.py               facts about the package, the tensors it expects, and the model's own call:
                              `inputs` takes a call apart, `result` puts the model's result together
    constants.pt              tensors that the model holds outside its parameters and buffers, if any
    messages.json             the messages between devices and their form, if devices are processes
    model.json                the fingerprint of the model, written by `pipe.save`

A saved package runs without capturing the model again, and without the compiler.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxpipe.codegen.package.call_adapter import call_functions, unreachable
from fxpipe.codegen.stage.stage_constants import constant_names
from fxpipe.codegen.stage.stage_file import emit_device, emit_epilogue, emit_stage, emit_totals
from fxpipe.codegen.text.line_layout import WIDTH, Brackets, Doc, prefix
from fxpipe.codegen.text.object_text import literal
from fxpipe.codegen.text.source_names import doc_prose, string
from fxpipe.codegen.text.statements import (
    BLANK,
    Assign,
    Block,
    Comment,
    Lines,
    Statement,
    import_blocks,
    text_of,
    tuple_of,
)
from fxpipe.errors import PackageError
from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.graph.graph import UNKNOWN, Graph, Ref, State, refs
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.plan.plan import dump as dump_plan
from fxpipe.ir.program.messages import MessageTable
from fxpipe.ir.program.messages import dump as dump_table
from fxpipe.ir.program.program import Program
from fxpipe.ir.program.whole_batch import ALONE, WholeBatch
from fxpipe.ir.schedule.schedule import Schedule, partners

CONSTANTS = "constants.pt"
MESSAGES = "messages.json"
FORMAT = 5  # the version of the files; raise it for each change that another fxpipe would read wrongly
PUBLIC = ("CHUNKS", "FORMAT", "INPUTS", "MODEL", "STAGES", "TENSORS", "TRAINING", "Scheduler", "inputs", "result")


def package(
    program: Program,
    plan: Plan,
    scheduler_source: str,
    notes: Sequence[str] = (),
    whole: WholeBatch = ALONE,
    by_device: bool = False,
    schedule: Schedule | None = None,
) -> dict[str, str]:
    """The files of the package, by name.

    - `notes`: facts for the header of each stage.
    - `whole`: what runs on the whole batch.
    - `by_device`: whether the stages of a device are in one file.
    - `schedule`: says which methods of backward and of pairs are needed.
    """
    notes = notes or [""] * len(program.stages)
    homes = _homes(program, by_device)
    if by_device:
        pairs = dict(zip(program.devices, homes, strict=True))
        stages = {f"{home}.py": emit_device(program, device, notes) for device, home in pairs.items()}
    else:
        kinds = {action.kind for action in schedule.place} if schedule else ()
        beside = [partners(schedule, j) if schedule else () for j in range(len(homes))]
        stages = {f"{home}.py": emit_stage(program, j, notes[j], kinds, beside[j]) for j, home in enumerate(homes)}
    others = {"scheduler.py": scheduler_source, "plan.json": dump_plan(plan)}
    others |= {} if whole.totals is None else {"totals.py": emit_totals(whole.totals)}
    others |= {} if whole.epilogue is None else {"epilogue.py": emit_epilogue(whole.epilogue)}
    return {"__init__.py": _init(program, plan, whole, homes), **stages, **others}


def _homes(program: Program, by_device: bool) -> list[str]:
    """The name of the file of each stage."""
    devices = list(dict.fromkeys(program.devices))
    return [f"device{devices.index(s.device)}" if by_device else f"stage{s.index}" for s in program.stages]


def _init(program: Program, plan: Plan, whole: WholeBatch, homes: Sequence[str]) -> str:
    functions, modules, call = call_functions(program.graph)
    by_device = not all(home == f"stage{j}" for j, home in enumerate(homes))
    names = tuple(f"{home}.Stage{j}" if by_device else f"Stage{j}" for j, home in enumerate(homes))
    relative = [f"from . import {', '.join(sorted(set(homes)))}"] if by_device else []
    relative += ["from .scheduler import Scheduler"]
    relative += [] if by_device else [f"from .{home} import Stage{j}" for j, home in enumerate(homes)]
    relative += [] if whole.totals is None else ["from .totals import Totals"]
    relative += [] if whole.epilogue is None else ["from .epilogue import Epilogue"]
    facts: dict[str, Doc] = {
        "FORMAT": str(FORMAT),
        "MODEL": string(program.graph.model),
        "TRAINING": str(program.graph.training),
        "CHUNKS": str(plan.chunks),
        "STAGES": Brackets("(", names, ")", "literal"),
    }
    facts |= {} if whole.totals is None else {"TOTALS": "(Totals,)  # what micro-batches must know of the whole batch"}
    facts |= {} if whole.epilogue is None else {"EPILOGUE": "(Epilogue,)  # what runs on the joined micro-batches"}
    facts |= {} if program.graph.loss is None else {"OUTPUTS": f"{_returns_outputs(program)}  # beside the loss"}
    loss = () if program.graph.loss is None else (BLANK, *_loss(program.graph.fingerprint))
    statements = (
        Lines((*_docstring(program, call), "", *import_blocks(modules, (), relative), "")),
        Assign(("__all__",), Brackets("[", tuple(map(string, PUBLIC)), "]", "literal")),
        BLANK,
        *(Assign((name,), doc) for name, doc in facts.items()),
        BLANK,
        Comment("The model's tensors that the stages hold: key, shape, type."),
        Assign(("TENSORS",), _tensors(program, whole)),
        BLANK,
        Comment("What a call brings: name, shape (b is the batch), type."),
        Assign(("INPUTS",), _input_types(program.graph, plan.chunks)),
        *loss,
        BLANK,
        BLANK,
        *functions,
        *_conditions(program.graph),
    )
    return "\n".join(text_of(statements)) + "\n"


def _docstring(program: Program, call: str) -> list[str]:
    n = len(program.stages)
    model = doc_prose(program.graph.model)
    mode = "training" if program.graph.training else "evaluation"
    run = "result = pipe"
    if program.graph.loss is not None:
        run = "loss, output = pipe.step" if _returns_outputs(program) else "loss = pipe.step"
        call = call.removesuffix(")") + ", outputs=True)" if _returns_outputs(program) else call
    return [
        f'"""{model} as a pipeline of {n} stage{"" if n == 1 else "s"}, for {mode}.',
        "",
        "fxpipe wrote these files; they are plain Python, to be read and edited.",
        "",
        f"    model = {model}(...)",
        "    pipe = fxpipe.load(folder, model)  # the stages hold the model's own parameters",
        *_wrapped(f"    {run}{doc_prose(call)}"),
        '"""',
    ]


def _returns_outputs(program: Program) -> bool:
    """Whether a step returns the model's result besides the loss."""
    return program.graph.result[1] is not None


def _wrapped(call: str) -> list[str]:
    """A call whose arguments are all simple, in lines that are not too long."""
    if len(call) <= WIDTH:
        return [call]
    head, _, arguments = call.partition("(")
    indent = " " * 8
    inner = textwrap.wrap(arguments.removesuffix(")") + ",", WIDTH, initial_indent=indent, subsequent_indent=indent)
    return [f"{head}(", *inner, "    )"]


def _tensors(program: Program, whole: WholeBatch) -> Doc:
    states = {state.held: state for one in (program, *whole.programs) for state in one.graph.states}
    return tuple_of(
        tuple_of((string(state.path), literal(tuple(state.type.shape)), string(DTYPES[state.type.dtype].torch)))
        for state in states.values()
        if state.kind != "constant" and not state.part and isinstance(state.type, TensorType)
    )


def _input_types(graph: Graph, chunks: int) -> Doc:
    """A row for each input that the caller gives. A strategy is for micro-batches of one size, which is a number in the
    graph; the caller's batch has `chunks` of them."""
    rows = []
    for item in graph.inputs:
        if item.path and isinstance(item.type, TensorType):
            times = (chunks if dim == item.batch_dim else 1 for dim in range(len(item.type.shape)))
            sizes = (
                size * many if isinstance(size, int) else size
                for size, many in zip(item.type.shape, times, strict=True)
            )
            shape = literal(tuple(sizes))
            rows.append(tuple_of((string(item.name), shape, string(DTYPES[item.type.dtype].torch))))
        elif item.path:
            rows.append(tuple_of((string(item.name), string(str(item.type)))))
    return tuple_of(rows)


def _loss(fingerprint: Sequence[tuple[str, str]]) -> tuple[Statement, ...]:
    """The assignment of the loss function's fingerprint: the properties that its values depend on."""
    rows = tuple_of(tuple_of(map(string, row)) for row in fingerprint)
    return Comment("The loss that is computed here."), Assign(("LOSS",), rows)


def with_loss(files: Mapping[str, str], graph: Graph, fingerprint: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The files with `fingerprint` in place of the graph's fingerprint of the loss."""
    old, new = ("\n".join(text_of(_loss(found))) for found in (graph.fingerprint, fingerprint))
    return {**files, "__init__.py": files["__init__.py"].replace(old, new)}


def with_mode(files: Mapping[str, str], made_for: bool, training: bool) -> dict[str, str]:
    """The files of a package that was made for one mode, with `training` as the mode that it begins with."""
    old, new = (f"\nTRAINING = {mode}\n" for mode in (made_for, training))
    return {**files, "__init__.py": files["__init__.py"].replace(old, new)}


def _conditions(graph: Graph) -> tuple[Statement, ...]:
    """The function `conditions`, with the conditions on sizes and numbers, if there are any."""
    known = [text for text in graph.conditions if text != UNKNOWN]
    if not known:
        return ()
    names = {item.name for item in graph.inputs} | {size.name for size in graph.sizes} | {"b"}
    used = sorted({name for text in known for name in re.findall(r"[^\W\d]\w*", text) if name in names})
    rows = tuple(prefix(f"{string(text)}: ", text) for text in known)
    about = '"""What a call must have in common with the captured one; b is the size of a micro-batch."""'
    returned = Brackets("return {", rows, "}", "literal")
    return BLANK, BLANK, Block(Brackets("def conditions(", tuple(used), "):"), (about, returned))


# To the disk ----------------------------------------------------------------------------------------------------------


def save(
    program: Program,
    files: Mapping[str, str],
    folder: str | Path,
    whole: WholeBatch = ALONE,
    table: MessageTable | None = None,
) -> None:
    """Write the package so that another process can load it, or several, with the `table` of its messages. Raises
    PackageError, and writes nothing, if it uses something that another process would not have."""
    tensors = {name: _savable(program, name, value) for name, value in constants(program, whole).items()}
    for file, text in files.items():
        if re.search(r"^import __main__$", text, re.MULTILINE):
            raise PackageError(
                f"{file} uses functions or classes of the script that runs now, which no other process can import; "
                "move them to a module of their own and import them from there"
            )
    if unknown := unreachable(program.graph):
        raise PackageError(
            f"{', '.join(unknown)} changes between calls of the model, and a saved package would not see it; "
            "pass it as an argument, or make it a buffer"
        )
    if UNKNOWN in program.graph.conditions:
        raise PackageError(
            "the model decides by a number that changes between calls, and a saved package would not know what; pass "
            "the same number each time"
        )
    for old in (CONSTANTS, MESSAGES):
        (Path(folder) / old).unlink(missing_ok=True)
    write(dict(files) | ({} if table is None else {MESSAGES: dump_table(table)}), folder)
    if tensors:
        torch.save(tensors, Path(folder) / CONSTANTS)


def write(files: Mapping[str, str], folder: str | Path) -> None:
    """Write the files. Stages of an earlier, longer package in the same folder are removed."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for old in path.glob("*.py"):
        if old.name not in files and re.fullmatch(r"(stage|device)\d+\.py|(totals|epilogue)\.py", old.name):
            old.unlink()
    for name, text in files.items():
        (path / name).write_text(text, encoding="utf-8", newline="\n")


def constants(program: Program, whole: WholeBatch = ALONE) -> dict[str, Any]:
    """The constants of the stages, by the name of the attribute."""
    found: dict[str, Any] = {}
    for part in (program, *whole.programs):
        values = {state.name: state.value for state in part.graph.states}
        found |= {name: values[state] for state, name in constant_names(part).items()}
    return found


def _savable(program: Program, name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    state = next(state for state in program.graph.states if constant_names(program).get(state.name) == name)
    raise PackageError(
        f"the constant {state.path or state.name!r} is a {type(value).__qualname__}, and only tensors can be saved"
        f"{_first_use(program, state)}; make it a tensor or a buffer of the model"
    )


def _first_use(program: Program, state: State) -> str:
    ops = (op for op in program.graph.ops if Ref(state.name) in refs((op.args, dict(op.kwargs))))
    return next((f"; it is used at {op.origin}" for op in ops), "")
