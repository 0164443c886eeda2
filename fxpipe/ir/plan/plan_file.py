"""Plans as files to edit by hand. A stage is given by the place where it begins, under a name and a line that the
reader knows: editing one line moves a cut.

    {"begins": "layers.3", "line": "model.py:12  x = layer(x)", "device": "cpu:1", "checkpoint": "never"}

A stage has all ops from where it begins to where the next one does, in the model's own order. `also` names ops from
elsewhere that run in it, such as a cheap op that no earlier stage needs. `line` is for the reader alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fxpipe.errors import file_name, similar
from fxpipe.ir.cluster.device_labels import Label
from fxpipe.ir.dataclass_json import from_plain, parse, to_plain, write
from fxpipe.ir.graph.graph import Graph, Op
from fxpipe.ir.once import once

from .plan import Chunks, Mode, Plan, Sharding, StagePlan
from .plan import load as load_plan


@dataclass(frozen=True)
class StagePlace:
    """One stage. `begins` is the name of an op, a module (its first op) or a line as in "model.py:12"; `line` and
    `also`: see above; the rest is as in `StagePlan`."""

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
    """As `Plan`, with stages given by the places where they begin. `placed` turns it into the plan for a graph."""

    model: str
    stages: tuple[StagePlace, ...]
    chunks: Chunks
    schedule: str = "gpipe"
    deferred_batch_norm: bool = False
    optimizer_sharding: Sharding = "none"


# Reading --------------------------------------------------------------------------------------------------------------


def load(text: str) -> Plan | PlanFile:
    """The plan in a file: a `Plan` if its stages list their ops, else a `PlanFile`. Raises ValueError for text that is
    no plan."""
    data = parse(text)
    stages = data.get("stages") if isinstance(data, dict) else None
    if isinstance(stages, list) and any(isinstance(stage, dict) and "ops" in stage for stage in stages):
        return load_plan(text)
    if isinstance(data, dict):
        data.pop("planned", None)
    return from_plain(PlanFile, data)


def placed(file: PlanFile, graph: Graph) -> Plan:
    """The plan for this graph. Raises ValueError if the graph lacks a place or an op (and names the nearest one), or
    if the stages are not in the graph's order."""
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
    return Plan(
        file.model,
        tuple(stages),
        file.chunks,
        file.schedule,
        file.deferred_batch_norm,
        optimizer_sharding=file.optimizer_sharding,
    )


@once
def places(graph: Graph) -> Mapping[str, int]:
    """The position of each place at which a stage may begin, by name. A module or line is where its first op is; a name
    of both an op and a module is the op."""
    found = {op.name: at for at, op in enumerate(graph.ops)}
    for at, op in enumerate(graph.ops):
        for path in accumulate(op.origin.module.split("."), lambda a, b: f"{a}.{b}"):
            found.setdefault(path, at)
        if op.origin.line:
            found.setdefault(_line(op), at)
    found.pop("", None)
    return found


def _line(op: Op) -> str:
    return f"{file_name(op.origin.file)}:{op.origin.line}"


def _position(known: Mapping[str, int], name: str, where: str, graph: Graph) -> int:
    if name not in known:
        raise ValueError(f"{where} is {name!r}, which is no op, module or line of {graph.model}{_near(name, known)}")
    return known[name]


def _near(name: str, known: Mapping[str, int]) -> str:
    near = similar(name, known)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


# Writing --------------------------------------------------------------------------------------------------------------


def dump(plan: Plan, graph: Graph) -> str:
    """The plan as the text of a file; `load` and `placed` give it back. If the stages do not follow the
    graph's order, the file lists all of their ops."""
    file = told(plan, graph)
    data = to_plain(plan if file is None else file)
    stages = data.pop("stages")
    if plan.optimizer_sharding == "none":  # as of nearly all plans
        del data["optimizer_sharding"]
    return write({**data, "stages": [_line_second(stage) for stage in stages]}, 3)


def _line_second(stage: dict[str, object]) -> dict[str, object]:
    order = ("begins", "line")
    return {key: stage[key] for key in order if key in stage} | stage


def told(plan: Plan, graph: Graph) -> PlanFile | None:
    """The plan with stages given by the places where they begin; None if `placed` would not give the plan back."""
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
    file = PlanFile(
        plan.model, tuple(stages), plan.chunks, plan.schedule, plan.deferred_batch_norm, plan.optimizer_sharding
    )
    try:
        return file if placed(file, graph) == plan else None
    except ValueError:
        return None


def _starts(homes: Sequence[int], stages: int) -> Iterator[int]:
    """For each stage the position where it begins: at that of its ops which leaves the fewest ops on the wrong side."""
    for s in range(stages):
        wrong = sum(home < s for home in homes)  # ops on the wrong side, if the stage begins at 0
        best, least = 0, len(homes) + 1
        for at, home in enumerate(homes):
            if home == s and wrong < least:
                best, least = at, wrong
            wrong += 1 if home >= s else -1
        yield best


def _name(graph: Graph, known: Mapping[str, int], at: int) -> str:
    """The name of a place for the reader: the outermost module that begins there, or else the op. An op that makes an
    output has another name in a training step than in a call, so its line is taken, if that stands for this op."""
    op = graph.ops[at]
    outside = graph.ops[at - 1].origin.module if at else ""
    for path in accumulate(op.origin.module.split("."), lambda a, b: f"{a}.{b}") if op.origin.module else ():
        entered = path != outside and not outside.startswith(f"{path}.")
        if entered and known.get(path) == at:
            return path
    returned = any(output.value == op.name for output in graph.outputs)
    return _line(op) if returned and op.origin.line and known.get(_line(op)) == at else op.name
