"""The messages of a program whose stages are in several processes, with their names in the generated code."""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.codegen.scheduler.value_locations import Places
from fxpipe.codegen.stage.stage_constants import constant_names
from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.graph.value_types import ScalarType, TensorType, ValueType
from fxpipe.ir.program.gradient_buckets import Bucket, buckets
from fxpipe.ir.program.messages import Form, LentTensor, MessageTable
from fxpipe.ir.program.program import Loan, Program
from fxpipe.ir.program.transfers import add_transfers
from fxpipe.ir.schedule.schedule import Schedule


def message_table(program: Program, schedule: Schedule) -> MessageTable:
    """The messages between the devices of the program, with their order and form."""
    places = Places(program)
    n = len(program.stages)
    moved = dict.fromkeys(move.value for move in program.moves)
    forms = {name: form(program.types[name]) for name in (*moved, *(loan.state for loan in program.loans))}
    shared = tuple(bucket for stage in program.stages for bucket in buckets(program, stage.index))
    forms |= {name: found for bucket in shared for name, found in _parts(bucket)}
    origins = {op.name: str(op.origin) for stage in program.stages for op in stage.ops}
    makers = {move.value: move.source for move in program.moves if move.target == n}
    return MessageTable(
        add_transfers(schedule, program),
        tuple(stage.devices for stage in program.stages),
        {name: places.name(name) for name in moved},
        {name: found for name, found in forms.items() if found is not None},
        {name: line for name, line in origins.items() if line},
        (*((size.name, places.name(size.input), size.dim) for size in program.graph.sizes), *_numbers(program, places)),
        tuple(_lent(program, loan, places.lent(loan)) for loan in program.loans),
        tuple(makers[output.value] for output in program.graph.outputs),
        shared,
        {name: _path(program, name) for bucket in shared for name, _ in bucket.tensors},
    )


def _numbers(program: Program, places: Places) -> Iterator[tuple[str, str, None]]:
    """The whole numbers among the inputs, which may be sizes of tensors that a stage makes."""
    for item in program.graph.inputs:
        if item.path and isinstance(item.type, ScalarType) and item.type.kind == "int":
            yield item.name, places.name(item.name), None


def form(kind: ValueType) -> Form | None:
    """The form of a value; None if its type cannot leave a stage."""
    if isinstance(kind, ScalarType):
        return Form({"int": "int64", "bool": "int64", "float": "float64"}[kind.kind], (), kind.kind)
    return Form(DTYPES[kind.dtype].torch, kind.shape) if isinstance(kind, TensorType) else None


def _parts(bucket: Bucket) -> Iterator[tuple[str, Form]]:
    for part in range(bucket.replicas):
        start, end = bucket.ends(part)
        for summed in (False, True):
            yield bucket.name(part, summed), Form(DTYPES[bucket.dtype].torch, (end - start,))


def _lent(program: Program, loan: Loan, name: str) -> LentTensor:
    return LentTensor(loan.state, loan.home, loan.user, *_path(program, loan.state), name)


def _path(program: Program, state: str) -> tuple[str, bool]:
    """The path or attribute of a tensor of the model in its stage, and whether it is a constant there."""
    constant = constant_names(program).get(state)
    return constant or program.state(state).held, constant is not None
