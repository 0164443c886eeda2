"""Gives each tensor of the model one home: the device that owns it.

    owners  fc.weight: cpu:0                   before                        after
    stage 0 on cpu:0  uses other tensors       owns other tensors            owns fc.weight, too
    stage 1 on cpu:1  reads fc.weight          owns fc.weight                borrows fc.weight from stage 0

The first call of a pipe decides the owners, and the programs of all later calls follow: over ranks, only the owner has
the tensor, for its optimizer and its checkpoint. So a stage elsewhere borrows it for a step. If several devices hold
parts of a tensor, the owner has the whole, and lends the others their parts. A stage that writes into a tensor of
another device works on a copy, which goes back to the owner after the call: a written loan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fxpipe.errors import PlanError
from fxpipe.ir.program.program import Loan, Program, Stage
from fxpipe.passes.pass_context import PassContext


def move_homes(program: Program, context: PassContext) -> Program:
    """The program in which each parameter and buffer belongs to a stage on the device that `context.owners` names.
    Raises PlanError if no stage is on that device."""
    moved: dict[str, tuple[int, int]] = {}
    written: list[Loan] = []
    for stage in program.stages:
        writes = {name for op in stage.ops for name in op.writes}
        for name in stage.states:
            state = program.state(name)
            owner = context.owners.get(state.path, stage.device) if state.kind != "constant" else stage.device
            if owner == stage.device:
                continue
            home = _new_home(program, name, owner)
            if name in writes:
                written.append(Loan(name, home, stage.index))
            else:
                moved[name] = stage.index, home
    if not moved and not written:
        return program
    loans = [loan for loan in program.loans if loan.state not in moved]
    for name, (before, home) in moved.items():
        users = {before, *(loan.user for loan in program.loans if loan.state == name)} - {home}
        loans += [Loan(name, home, user) for user in sorted(users)]
    stages = tuple(_with_homes(program, loans, moved))
    return replace(program, loans=tuple(loans), written_loans=tuple(written), stages=stages)


def _with_homes(program: Program, loans: Sequence[Loan], moved: Mapping[str, tuple[int, int]]) -> Iterator[Stage]:
    """The stages that own and borrow as the loans say. `moved`: the old and the new home of each moved tensor."""
    for stage in program.stages:
        states = [name for name in stage.states if name not in moved]
        states += [name for name, (_, home) in moved.items() if home == stage.index]
        borrows = tuple(loan.state for loan in loans if loan.user == stage.index)
        yield replace(stage, states=tuple(states), borrows=borrows)


def _new_home(program: Program, name: str, owner: str) -> int:
    """The first stage on the owner's device that uses the tensor, or if none does, the first one there."""
    users = {loan.user for loan in program.loans if loan.state == name}
    there = [stage.index for stage in program.stages if stage.device == owner]
    if not there:
        raise PlanError(
            f"{owner} has owned {program.state(name).path} since the first call, and has no stage in this one: give a "
            "batch with as many samples as the first one had"
        )
    return next((index for index in there if index in users), there[0])
