"""Plans as files that are edited by hand: of each stage the place where it begins, by a name and a line that the reader
knows, so that a cut is moved by editing one line.

    {"begins": "layers.3", "line": "model.py:12  x = layer(x)", "device": "cpu:1", "checkpoint": "never"}

A stage has all ops from where it begins to where the next one does, in the model's own order. `also` names ops of other
places that run in it, such as a cheap one that nothing before needs. `line` is for the reader alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate, pairwise
from pathlib import PurePath

from fxpipe.ir.cluster.device_labels import Label
from fxpipe.ir.dataclass_json import from_plain, parse, to_plain, write
from fxpipe.ir.graph.graph import Graph, Op

from .plan import Chunks, Mode, Plan, StagePlan
from .plan import load as load_plan


@dataclass(frozen=True)
class StagePlace:
    """One stage. `begins` is an op by its name, a module, which stands for its first op, or a line as in "model.py:12".
    All else is as in `StagePlan`."""

    begins: str
    device: Label
    checkpoint: Mode
    line: str = ""
    also: tuple[str, ...] = ()
    offload: bool = False
    replicas: tuple[Label, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        return (self.device, *self.replicas)


@dataclass(frozen=True)
class PlanFile:
    """A plan as `Plan` is, whose stages are told by where they begin. `placed` gives the plan for a graph."""

    model: str
    stages: tuple[StagePlace, ...]
    chunks: Chunks
    schedule: str = "gpipe"
    deferred_batch_norm: bool = False


# Reading --------------------------------------------------------------------------------------------------------------


def load(text: str) -> Plan | PlanFile:
    """The plan in a file, by the places where its stages begin or by all of their ops. Raises ValueError for text that
    is none."""
    data = parse(text)
    stages = data.get("stages") if isinstance(data, dict) else None
    if isinstance(stages, list) and any(isinstance(stage, dict) and "ops" in stage for stage in stages):
        return load_plan(text)
    if isinstance(data, dict):
        data.pop("planned", None)
    return from_plain(PlanFile, data)


def placed(file: PlanFile, graph: Graph) -> Plan:
    """The plan for this graph. Raises ValueError for a place or an op that the graph does not have, with the nearest
    name, and where stages do not begin one after the other."""
    if file.model != graph.model:
        raise ValueError(f"the plan is for another model: its model is {file.model!r}, and this one {graph.model!r}")
    if not file.stages:
        raise ValueError("the plan has no stages")
    known = places(graph)
    starts = [_position(known, stage.begins, f"stages[{s}].begins", graph) for s, stage in enumerate(file.stages)]
    for s, (before, here) in enumerate(pairwise(starts), 1):
        if here <= before:
            names = f"{file.stages[s].begins!r}, which does not come after {file.stages[s - 1].begins!r}"
            raise ValueError(
                f"stages[{s}].begins is {names}, where stage {s - 1} begins; stages are in the model's order"
            )
    homes = [s for s, end in enumerate([*starts[1:], len(graph.ops)]) for _ in range(end - (starts[s] if s else 0))]
    moved: dict[str, int] = {}
    positions = {op.name: at for at, op in enumerate(graph.ops)}
    for s, stage in enumerate(file.stages):
        for name in stage.also:
            if name not in positions:
                raise ValueError(
                    f"stages[{s}].also names {name!r}, which is no op of {graph.model}{_near(name, positions)}"
                )
            if moved.setdefault(name, s) != s:
                raise ValueError(
                    f"stages[{moved[name]}].also and stages[{s}].also both name {name!r}: keep one of them"
                )
            homes[positions[name]] = s
    for op, home in zip(graph.ops[: starts[0]], homes, strict=False):
        if home == 0 and op.name not in moved:
            first = file.stages[0].begins
            raise ValueError(
                f"stages[0].begins is {first!r}, and {op.name!r}, at {op.origin}, comes before it and is in no stage: "
                f"write {op.name!r}"
            )
    rows = [tuple(op.name for op, home in zip(graph.ops, homes, strict=True) if home == s) for s in range(len(starts))]
    stages = (
        StagePlan(row, stage.device, stage.checkpoint, stage.offload, stage.replicas)
        for row, stage in zip(rows, file.stages, strict=True)
    )
    return Plan(file.model, tuple(stages), file.chunks, file.schedule, file.deferred_batch_norm)


def places(graph: Graph) -> dict[str, int]:
    """The position of each place that a stage may begin at, by its names: an op goes before a module of the same name,
    and a module or line is where its first op is."""
    found = {op.name: at for at, op in enumerate(graph.ops)}
    for at, op in enumerate(graph.ops):
        for path in accumulate(op.origin.module.split("."), lambda a, b: f"{a}.{b}"):
            found.setdefault(path, at)
        if op.origin.line:
            found.setdefault(_line(op), at)
    found.pop("", None)
    return found


def _line(op: Op) -> str:
    return f"{PurePath(op.origin.file).name}:{op.origin.line}"


def _position(known: Mapping[str, int], name: str, where: str, graph: Graph) -> int:
    if name not in known:
        raise ValueError(f"{where} is {name!r}, which is no op, module or line of {graph.model}{_near(name, known)}")
    return known[name]


def _near(name: str, known: Mapping[str, int]) -> str:
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


# Writing --------------------------------------------------------------------------------------------------------------


def dump(plan: Plan, graph: Graph) -> str:
    """The plan as the text of a file; `load` and `placed` give it back. A plan in which stages do not follow the order
    of the graph, as only a program writes one, is told by all of its ops."""
    file = told(plan, graph)
    data = to_plain(plan if file is None else file)
    stages = data.pop("stages")
    return write({**data, "stages": [_line_second(stage) for stage in stages]}, 3)


def _line_second(stage: dict[str, object]) -> dict[str, object]:
    order = ("begins", "line")
    return {key: stage[key] for key in order if key in stage} | stage


def told(plan: Plan, graph: Graph) -> PlanFile | None:
    """The plan by the places where its stages begin; None where that would not give it back."""
    home = {name: s for s, stage in enumerate(plan.stages) for name in stage.ops}
    homes = [home.get(op.name, -1) for op in graph.ops]
    known, starts = places(graph), list(_starts(homes, len(plan.stages)))
    stages = []
    for s, (start, end) in enumerate(pairwise([*starts, len(homes)])):
        also = [op.name for at, op in enumerate(graph.ops) if homes[at] == s and not (start <= at < end)]
        begins, op, stage = _name(graph, known, start), graph.ops[start], plan.stages[s]
        stages.append(
            StagePlace(
                begins, stage.device, stage.checkpoint, str(op.origin), tuple(also), stage.offload, stage.replicas
            )
        )
    file = PlanFile(plan.model, tuple(stages), plan.chunks, plan.schedule, plan.deferred_batch_norm)
    try:
        return file if placed(file, graph) == plan else None
    except ValueError:
        return None


def _starts(homes: Sequence[int], stages: int) -> Iterator[int]:
    """For each stage one of its ops, such that as few ops as can be are on the wrong side of it."""
    for s in range(stages):
        wrong = sum(home < s for home in homes)  # ops that a stage which begins at 0 would have too many
        best, least = 0, len(homes) + 1
        for at, home in enumerate(homes):
            if home == s and wrong < least:
                best, least = at, wrong
            wrong += 1 if home >= s else -1
        yield best


def _name(graph: Graph, known: Mapping[str, int], at: int) -> str:
    """What the reader knows the place by: the outermost module that begins there, or else the op. A step calls what the
    model returns by another name than a call does, so that is told by its line, where that is enough."""
    op = graph.ops[at]
    outside = graph.ops[at - 1].origin.module if at else ""
    for path in accumulate(op.origin.module.split("."), lambda a, b: f"{a}.{b}") if op.origin.module else ():
        entered = path != outside and not outside.startswith(f"{path}.")
        if entered and known.get(path) == at:
            return path
    returned = any(output.value == op.name for output in graph.outputs)
    return _line(op) if returned and op.origin.line and known.get(_line(op)) == at else op.name
