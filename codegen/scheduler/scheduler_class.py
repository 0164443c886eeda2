"""The parts that both kinds of generated schedulers have: the class attributes that their base reads, and the loans of
tensors between stages, such as tied weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from fxpipe.codegen.scheduler.value_locations import Places
from fxpipe.codegen.stage.stage_constants import constant_names
from fxpipe.codegen.text.line_layout import Brackets
from fxpipe.codegen.text.source_names import prose, state_path, string
from fxpipe.codegen.text.statements import BLANK, Assign, Block, Call, Comment, Statement, apart, rows_of, tuple_of
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.program.program import Loan, Program, Stage
from fxpipe.ir.program.whole_batch import WholeBatch

Group = Sequence[Statement]  # an empty line goes before and after it


def attributes(program: Program, places: Places, whole: WholeBatch) -> Group:
    """The class attributes that `SchedulerBase` reads."""
    takes = () if whole.totals is None else whole.totals.stages[0].takes
    known = {name for stage in program.stages for name in stage.takes}
    known |= {*takes, *(output.value for output in program.graph.outputs)}
    sizes = [size for size in program.graph.sizes if size.name in known]
    inputs = [item for item in program.graph.inputs if item.path]
    detached = [item.name for item in inputs if program.types[item.name] != item.type]
    replicas = [tuple_of(map(string, stage.replicas)) for stage in program.stages]
    found = [
        *rows_of("devices", (string(stage.device) for stage in program.stages)),
        *rows_of("inputs", (row(places.name(i.name), i.batch_dim) for i in inputs)),
        *rows_of("sizes", (row(places.name(s.name), places.name(s.input), s.dim) for s in sizes)),
        *rows_of("outputs", (row(places.name(o.value), o.batch_dim, o.reduce) for o in program.graph.outputs)),
        *rows_of("detached", (string(places.name(name)) for name in detached)),
        *rows_of("replicas", replicas if any(stage.replicas for stage in program.stages) else ()),
    ]
    if whole.totals is not None:
        found += [
            Comment("what is computed from the whole batch, and from what of it"),
            *_gives_and_takes("totals", whole.totals.stages[0], places),
        ]
    if whole.epilogue is not None:
        found += [
            Comment("what is computed from the joined micro-batches, and from what of them"),
            *_gives_and_takes("epilogue", whole.epilogue.stages[0], places),
            Assign(("epilogue_stage",), str(program.epilogue_stage)),
        ]
    if any(op.random for stage in program.stages for op in stage.ops):
        found.append("random = True")
    return found


def _gives_and_takes(name: str, stage: Stage, places: Places) -> Iterable[Statement]:
    """The names of what a stage of the whole batch gives and takes, as class attribute `name`."""
    both = (stage.gives, stage.takes)
    return rows_of(name, (tuple_of(string(places.name(value)) for value in names) for names in both))


def row(*items: str | int | None) -> Brackets:
    return tuple_of(string(item) if isinstance(item, str) else repr(item) for item in items)


def section(stage: Stage, methods: Iterable[Block | None]) -> Group:
    """The methods of a stage, under its number and device."""
    head = Comment(f"stage {stage.index}, {prose(stage.device)}", rule=True)
    return [head, BLANK, *apart([method] for method in methods if method)]


def draws(stage: Stage, stages: str) -> tuple[Statement, ...]:
    """The assignment of `draw`, which seeds the random ops of the stage, if it has any."""
    if not any(op.random for op in stage.ops):
        return ()
    return (Assign(("draw",), Call("Draws", ("m.seed", "i", f"{stages}[{stage.index}].device"))),)


def lend(program: Program, places: Places, batches: str) -> Group:
    """The method that lends tensors from one stage to another, once a run."""
    body: list[Statement] = []
    for (home, user), alike in groupby(program.loans, key=lambda loan: (loan.home, loan.user)):
        loans = list(alike)
        which = prose(program.state(loans[0].state).held) + f": stage {home} owns it, stage {user} uses it too"
        if len(loans) > 1:
            which = f"stage {home} owns these, stage {user} uses them too"
        body.append(Comment(f"{which}; their gradients add up"))
        for loan in loans:
            call = Call("m.lend", (str(user), _owned(program, loan)))
            body.append(Assign((f"m.lent.{places.lent(loan)}",), call))
    return [Block(f"def lend(self, m: {batches}) -> None:", tuple(body))] if body else []


def _owned(program: Program, loan: Loan) -> str:
    """The tensor in the stage that owns it."""
    held = constant_names(program).get(loan.state)
    path = f"self.{held}" if held else state_path(program.state(loan.state).held)
    return f"self.stages[{loan.home}]" + path.removeprefix("self")


def differentiable(name: str, program: Program) -> bool:
    """Whether a gradient comes back for the value."""
    kind = program.types[name]
    return isinstance(kind, TensorType) and kind.grad
