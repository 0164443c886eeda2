"""Gives each tensor of the model one owner, where stages of several devices hold parts of it.

    owners  fc.weight: cpu:0                   before                        after
    stage 0 on cpu:0  reads rows 0 to 4        owns fc.weight, rows 0 to 4   owns rows 0 to 4, and rows 4 to 8
    stage 1 on cpu:1  reads rows 4 to 8        owns fc.weight, rows 4 to 8   borrows rows 4 to 8 from stage 0

In one process, all devices see the whole tensor. Over ranks, the parameters that a rank gives its optimizer, and saves,
are whole: so one rank has the tensor, and lends the others their parts, once a step.
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
    Raises PlanError if no stage is on that device, or a stage on another device writes the tensor."""
    moved = {}
    users = {name: [stage.index] for stage in program.stages for name in stage.states}
    for loan in program.loans:
        users[loan.state].append(loan.user)
    for stage in program.stages:
        for name in stage.states:
            state = program.state(name)
            owner = context.owners.get(state.path, stage.device) if state.kind != "constant" else stage.device
            if owner != stage.device:
                moved[name] = stage.index, _new_home(program, name, owner, users[name])
    if not moved:
        return program
    loans = [loan for loan in program.loans if loan.state not in moved]
    for name, (before, home) in moved.items():
        loans += [Loan(name, home, user) for user in sorted({before, *users[name]} - {home})]
    return replace(program, loans=tuple(loans), stages=tuple(_with_homes(program, loans, moved)))


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
    path = program.state(name).path
    for stage in (program.stages[index] for index in users):
        op = next((op for op in stage.ops if name in op.writes), None)
        if op is not None:
            raise PlanError(
                f"{op.origin}\nforward writes {path} here, on {stage.device}, and {owner} has owned it since the first "
                "call: make the first call, or that of example_inputs, with the model in training"
            )
    there = _on_device(program).get(owner)
    if not there:
        raise PlanError(
            f"{owner} has owned {path} since the first call, and has nothing to compute in this one: give a batch with "
            "as many samples as the first one had"
        )
    return next((index for index in sorted(users[1:]) if program.devices[index] == owner), there[0])


@once
def _on_device(program: Program) -> dict[str, list[int]]:
    """The stages of each device."""
    found: dict[str, list[int]] = {}
    for stage in program.stages:
        found.setdefault(stage.device, []).append(stage.index)
    return found
