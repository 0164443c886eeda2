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
from fxpipe.ir.once import once
from fxpipe.ir.program.program import Loan, Program, Stage
from fxpipe.passes.pass_context import PassContext


def move_homes(program: Program, context: PassContext) -> Program:
    """The program in which each parameter and buffer belongs to a stage on the device that `context.owners` names.
    Raises PlanError if no stage is on that device."""
    moved: dict[str, tuple[int, int]] = {}
    written: list[Loan] = []
    users = {name: [stage.index] for stage in program.stages for name in stage.states}
    for loan in program.loans:
        users[loan.state].append(loan.user)
    for stage in program.stages:
        writes = {name for op in stage.ops for name in op.writes}
        for name in stage.states:
            state = program.state(name)
            owner = context.owners.get(state.path, stage.device) if state.kind != "constant" else stage.device
            if owner == stage.device:
                continue
            home = _new_home(program, name, owner, users[name])
            if name in writes:
                written.append(Loan(name, home, stage.index))
            else:
                moved[name] = stage.index, home
    if not moved and not written:
        return program
    loans = [loan for loan in program.loans if loan.state not in moved]
    for name, (before, home) in moved.items():
        loans += [Loan(name, home, user) for user in sorted({before, *users[name]} - {home})]
    stages = tuple(_with_homes(program, loans, moved))
    return replace(program, loans=tuple(loans), written_loans=tuple(written), stages=stages)


def _with_homes(program: Program, loans: Sequence[Loan], moved: Mapping[str, tuple[int, int]]) -> Iterator[Stage]:
    """The stages that own and borrow as the loans say. `moved`: the old and the new home of each moved tensor."""
    coming: dict[int, list[str]] = {}
    for name, (_, home) in moved.items():
        coming.setdefault(home, []).append(name)
    borrowing = replace(program, loans=tuple(loans)).borrowing
    for stage in program.stages:
        states = [name for name in stage.states if name not in moved] + coming.get(stage.index, [])
        borrows = tuple(loan.state for loan in borrowing[stage.index])
        yield replace(stage, states=tuple(states), borrows=borrows)


def _new_home(program: Program, name: str, owner: str, users: Sequence[int]) -> int:
    """The first stage on the owner's device that uses the tensor, or if none does, the first one there. `users`: the
    stages that use it."""
    there = _on_device(program).get(owner)
    if not there:
        raise PlanError(
            f"{owner} owns {program.state(name).path} and has no stage in the plan: give it one, which may have no ops"
        )
    return next((index for index in sorted(users[1:]) if program.devices[index] == owner), there[0])


@once
def _on_device(program: Program) -> dict[str, list[int]]:
    """The stages of each device."""
    found: dict[str, list[int]] = {}
    for stage in program.stages:
        found.setdefault(stage.device, []).append(stage.index)
    return found
