"""The wires of a program whose stages are in several processes: messages are called as in the generated code."""

from __future__ import annotations

from fxpipe.codegen.names import identifier
from fxpipe.codegen.package import DTYPES
from fxpipe.codegen.places import Places
from fxpipe.codegen.stage import constant_names
from fxpipe.ir.program import Loan, Program
from fxpipe.ir.schedule import Schedule
from fxpipe.ir.transfers import add_transfers
from fxpipe.ir.types import ScalarType, TensorType, ValueType
from fxpipe.ir.wires import Form, Lent, Wires


def wires(program: Program, schedule: Schedule) -> Wires:
    """What moves between the devices of the program, in what order and form."""
    places = Places(program)
    n = len(program.stages)
    moved = dict.fromkeys(move.value for move in program.moves)
    forms = {name: form(program.types[name]) for name in (*moved, *(loan.state for loan in program.loans))}
    origins = {op.name: str(op.origin) for stage in program.stages for op in stage.ops}
    makers = {move.value: move.source for move in program.moves if move.target == n}
    return Wires(
        add_transfers(schedule, program),
        program.devices,
        {name: places.name(name) for name in moved},
        {name: found for name, found in forms.items() if found is not None},
        {name: line for name, line in origins.items() if line},
        tuple((size.name, places.name(size.input), size.dim) for size in program.graph.sizes),
        tuple(_lent(program, loan) for loan in program.loans),
        tuple(makers[output.value] for output in program.graph.outputs),
    )


def form(kind: ValueType) -> Form | None:
    """The form of a value; None for what never leaves its stage."""
    if isinstance(kind, ScalarType):
        return Form({"int": "int64", "bool": "int64", "float": "float64"}[kind.kind], (), kind.kind)
    return Form(DTYPES[kind.dtype], kind.shape) if isinstance(kind, TensorType) else None


def _lent(program: Program, loan: Loan) -> Lent:
    constant = constant_names(program).get(loan.state)
    path = constant or program.state(loan.state).path
    return Lent(loan.state, loan.home, loan.user, path, constant is not None, lent_name(loan))


def lent_name(loan: Loan) -> str:
    """The attribute of `m.lent` that holds the tensor for its user, in a step."""
    return f"{identifier(loan.state)}_for_{loan.user}"
