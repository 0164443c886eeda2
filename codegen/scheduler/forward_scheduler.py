"""The scheduler of a program as a Python file: the order of tasks, and the copies between devices.

    class Scheduler(Pipeline):
        ready_1(m, i)     before stage 1 runs on micro-batch i: the order of backward, copies from other devices
        compute_1(m, i)   runs the stage, on its worker, and deletes values used for the last time

`Pipeline.run` loops over the micro-batches, so the size of the file depends only on the stages. Between CPU workers
nothing is copied, so their files have no code for copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxpipe.codegen.scheduler.schedule_grid import docstring
from fxpipe.codegen.scheduler.scheduler_class import Group, attributes, differentiable, draws, lend, section
from fxpipe.codegen.scheduler.value_locations import Places, torch_device
from fxpipe.codegen.text.source_names import prose
from fxpipe.codegen.text.statements import (
    Assign,
    Block,
    Call,
    Comment,
    Delete,
    Statement,
    apart,
    called_functions,
    text_of,
)
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.plan.plan import FORWARD_AGAIN
from fxpipe.ir.program.program import Program, Stage
from fxpipe.ir.program.whole_batch import ALONE, WholeBatch

RUNTIME = ("Draws", "checkpoint", "copy", "fork", "join", "wait")  # what the methods may use of fxpipe.runtime


def emit_scheduler(program: Program, chunks: int, whole: WholeBatch = ALONE) -> str:
    """The source of `scheduler.py`, for GPipe's clock of `chunks` micro-batches. `whole` runs on the whole batch."""
    places = Places(program)
    head, gather = attributes(program, places, whole), _gather(program, places)
    sections = [
        section(stage, (_ready(stage, places, chunks > 1), _compute(stage, places))) for stage in program.stages
    ]
    body = apart([head, lend(program, places, "Batches"), *sections, gather])
    called = set(called_functions(body))
    used = [name for name in RUNTIME if name in called]
    imports = ["from typing import Any", ""] if gather else []
    imports += ["from fxpipe.engines.local.forward_engine import Batches, Pipeline"]
    imports += [f"from fxpipe.runtime import {', '.join(used)}"] if used else []
    lines = text_of([Block("class Scheduler(Pipeline):", body)])
    return "\n".join([*docstring(program, chunks), "", *imports, "", "", *lines]) + "\n"


# Before a stage runs --------------------------------------------------------------------------------------------------


def _ready(stage: Stage, places: Places, ordered: bool) -> Block | None:
    """`ready_j`: copies from other devices, and the edge from micro-batch i to i - 1 if there are several."""
    # Copies stand before the join, so that backward starts them before the other micro-batch's work.
    fork, join = _order(stage, places) if ordered else ((), ())
    body = (*fork, *_opens(stage, places), *join)
    return Block(f"def ready_{stage.index}(self, m: Batches, i: int) -> None:", body) if body else None


def _order(stage: Stage, places: Places) -> tuple[Group, Group]:
    """The statements that make the token of micro-batch i - 1, and those that join it to micro-batch i."""
    j = stage.index
    takes = tuple(places.at(name, j) for name in stage.takes if differentiable(name, places.program))
    gives = tuple(places.at(name, j, "i - 1") for name in stage.gives if differentiable(name, places.program))
    if not takes or not gives or stage.checkpoint == "always":
        return (), ()  # `checkpoint` takes the token itself; without takes there is nothing to join
    fork: Group = ()
    if stage.checkpoint == "except_last":
        token, condition = f"m.after[{j}]", "if m.grad and i == m.last:"
        why = Comment(f"{prose(stage.device)} runs B(i), then F(i - 1) again, then B(i - 1)")
    else:
        token, condition = "token", "if m.grad and i > 0:"
        why = Comment(f"{prose(stage.device)} runs B(i) before B(i - 1)")
        fork = (Assign((*gives, "token"), Call("fork", gives)),)
    join = Assign(takes, Call("join", (token, *takes)))
    if any(places.arrives(name, j) for name in stage.takes) and fork:
        return [Block(condition, (why, *fork))], [Block(condition, (join,))]
    return (), [Block(condition, (why, *fork, join))]


def _opens(stage: Stage, places: Places) -> Iterator[Statement]:
    """The copies of values from other devices, by source."""
    j = stage.index
    come = [name for name in stage.takes if places.arrives(name, j)]
    for name in come:
        if places.sources[name, j] < 0:
            yield from _input(stage, name, places)
    for source in sorted({places.sources[name, j] for name in come} - {-1}):
        for names in _alike([name for name in come if places.sources[name, j] == source], places):
            yield from _copy(stage, source, names, places)


def _input(stage: Stage, name: str, places: Places) -> Iterator[Statement]:
    """The copy of an input, which may be on any device. It waits for nothing."""
    j, here, there = stage.index, places.at(name, stage.index), places.at(name, -1)
    yield Assign((here,), Call("copy", ("None", f"self.streams[{j}, i]", f"self.stages[{j}].device", there)))
    yield _wait(j, (here,))
    yield Delete((there,) if places.done_by_copy(name, -1, j) else ())


def _wait(j: int, here: tuple[str, ...]) -> Statement:
    return Assign(here, Call("wait", (f"m.compute[{j}]", f"self.streams[{j}, i]", *here)))


def _copy(stage: Stage, source: int, names: Sequence[str], places: Places) -> Iterator[Statement]:
    j, devices = stage.index, places.program.devices
    there = tuple(places.at(name, source) for name in names)
    here = tuple(places.at(name, j) for name in names)
    long = any((source, j) == (move.source, move.target) for move in places.program.portals)
    past = f", past stage {' and '.join(map(str, range(source + 1, j)))}" if long else ""
    yield Comment(f"{prose(devices[source])} -> {prose(devices[j])}{past}; the copy waits for F(i) alone")
    streams = (f"self.streams[{source}, i]", f"self.streams[{j}, i]")
    yield Assign(here, Call("copy", (*streams, f"self.stages[{j}].device", *there)))
    if torch_device(devices[j]) != "cpu":
        yield _wait(j, here)
    gone = (place for name, place in zip(names, there, strict=True) if places.done_by_copy(name, source, j))
    yield Delete(tuple(gone))


# A stage runs ---------------------------------------------------------------------------------------------------------


def _compute(stage: Stage, places: Places) -> Block:
    """`compute_j`: the call, the preparation of copies to other devices, and the deletions."""
    j, call = stage.index, _call(stage, places)
    gone = tuple(places.at(name, j) for name in stage.takes if places.done(name, j))
    body: tuple[Statement, ...] = (
        *draws(stage, "self.stages"),
        *(_checkpointed(stage, call, places) if stage.checkpoint in FORWARD_AGAIN else (call,)),
        *_sends(stage, places),
        Delete(gone, "used for the last time"),
    )
    return Block(f"def compute_{j}(self, m: Batches, i: int) -> None:", body)


def _arguments(stage: Stage, places: Places) -> tuple[str, ...]:
    draw = ("draw",) if any(op.random for op in stage.ops) else ()
    return (*(places.at(name, stage.index) for name in stage.takes), *places.borrowed(stage), *draw)


def _call(stage: Stage, places: Places) -> Statement:
    gives = tuple(places.at(name, stage.index) for name in stage.gives)
    return Assign(gives, Call(f"self.stages[{stage.index}].forward", _arguments(stage, places)))


def _checkpointed(stage: Stage, plain: Statement, places: Places) -> Iterator[Statement]:
    """The checkpointed call, and the plain call for micro-batches that are not recomputed."""
    j, always = stage.index, stage.checkpoint == "always"
    gives = tuple(places.at(name, j) for name in stage.gives)
    again = "every micro-batch is" if always else "all micro-batches but the last are"
    args = (f"self.stages[{j}]", f"({j}, i)", "m.context", f"m.after[{j}]", *_arguments(stage, places))
    bare = (places.at(name, j) for name in stage.gives if _looks_differentiable(name, places))
    checkpointed: tuple[Statement, ...] = (
        Comment(f"{again} computed again in backward"),
        Assign((*(gives or ("_",)), f"m.after[{j}]"), Call("checkpoint", args)),
        *(Assign((place,), f"{place}.detach()", "no gradient goes through it") for place in bare),
    )
    yield Block(f"if m.grad{'' if always else ' and i < m.last'}:", checkpointed)
    given = tuple(places.at(name, j) for name in stage.gives if differentiable(name, places.program))
    join: Group = ()
    if not always and given and not any(differentiable(name, places.program) for name in stage.takes):
        why = "no input has a gradient, so the output takes the token: B(i), F(i - 1) again, B(i - 1)"
        join = (Comment(why), Assign(given, Call("join", (f"m.after[{j}]", *given))))
    yield Block("else:", (plain, *join))


def _sends(stage: Stage, places: Places) -> Group:
    """The wait of the copy stream for this task; so a later copy does not wait for later tasks."""
    j = stage.index
    if torch_device(stage.device) == "cpu" or not any(places.leaves(name, j) for name in stage.gives):
        return ()
    why = Comment(f"what leaves {prose(stage.device)} may go once F(i) is done")
    return why, Call(f"self.streams[{j}, i].wait_stream", (f"m.compute[{j}]",))


# After the last tick --------------------------------------------------------------------------------------------------


def _gather(program: Program, places: Places) -> Group:
    """The method that starts the recomputation of the last micro-batch, where it is recomputed."""
    always = [stage.index for stage in program.stages if stage.checkpoint == "always"]
    outputs = [output.value for output in program.graph.outputs if differentiable(output.value, places.program)]
    if not always or not outputs:
        return ()
    place = f"m[m.last].{places.name(max(outputs, key=places.home))}"
    stages = f"({', '.join(map(str, always))}{',' if len(always) == 1 else ''})"
    body = (
        Comment("nothing runs after the last micro-batch: backward starts with computing it again"),
        Block(f"for j in {stages}:", (Assign((place,), Call("join", ("m.after[j]", place))),)),
        "return super().gather(m)",
    )
    return [Block("def gather(self, m: Batches) -> tuple[Any, ...]:", body)]


# Kinds of values -----------------------------------------------------------------------------------------------------


def _alike(names: Sequence[str], places: Places) -> Iterator[list[str]]:
    """The tensors with a gradient, then those without: in one copy with the others these would get one."""
    tensors = [name for name in names if isinstance(places.program.types[name], TensorType)]
    for grad in (True, False):
        group = [name for name in tensors if differentiable(name, places.program) == grad]
        if group:
            yield group


def _looks_differentiable(name: str, places: Places) -> bool:
    """Whether the value has no gradient, but an element type that could have one."""
    kind = places.program.types[name]
    return isinstance(kind, TensorType) and not kind.grad and kind.dtype.startswith(("f", "bf", "c"))
