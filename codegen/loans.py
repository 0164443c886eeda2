"""Tensors of the model that one stage owns and others use too: tied weights, a shared table.

They are lent once a run. Between CPU workers that is a name for the same tensor; on another device it is a copy, whose
gradient, summed over the micro-batches, comes back once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from fxpipe.codegen.constants import constant_names
from fxpipe.codegen.lines import INDENT, WIDTH
from fxpipe.codegen.names import clip, prose, state_path
from fxpipe.codegen.places import Places, torch_device
from fxpipe.codegen.statements import assign, moved
from fxpipe.ir.program import Loan, Program


def lend(program: Program, places: Places) -> list[str]:
    """The method that lends tensors from one stage to another, once a run."""
    if not program.loans:
        return []
    constants = constant_names(program)
    users: dict[str, list[int]] = {}
    for loan in program.loans:
        users.setdefault(places.lent(loan), []).append(loan.user)
    lines = [f"{INDENT}def lend(self, m: Batches) -> None:"]
    first = [loan for loan in program.loans if loan.user == users[places.lent(loan)][0]]
    for (home, stages), alike in groupby(first, key=lambda loan: (loan.home, users[places.lent(loan)])):
        loans = list(alike)
        lines.append(reason(program, loans, stages))
        here, there = (torch_device(program.devices[index]) for index in (home, stages[0]))
        for loan in loans:
            lines += _lend(f"m.lent.{places.lent(loan)}", owned(program, loan, constants), here, there, stages[0])
    return lines


def reason(program: Program, loans: Sequence[Loan], users: Sequence[int]) -> str:
    """The comment above tensors that one stage lends to the same others."""
    stages = " and ".join(map(str, users))
    path, home = prose(program.state(loans[0].state).held), loans[0].home
    one = f"{path}: stage {home} owns it, stage {stages} uses it too; their gradients add up"
    many = f"stage {home} owns these, stage {stages} uses them too; their gradients add up"
    return clip(f"{INDENT * 2}# {one if len(loans) == 1 else many}", WIDTH)


def _lend(place: str, owned: str, here: str, there: str, user: int) -> list[str]:
    """The tensor on the borrower's device; a path that is too long for the line gets one of its own."""
    if here != there:
        return assign([place], moved(owned, user, there), 2)
    if len(f"{INDENT * 2}{place} = {owned}") <= WIDTH:
        return assign([place], owned, 2)
    return [*assign(["owned"], owned, 2), *assign([place], "owned", 2)]


def owned(program: Program, loan: Loan, constants: Mapping[str, str]) -> str:
    """The tensor in the stage that owns it."""
    held = constants.get(loan.state)
    path = f"self.{held}" if held else state_path(program.state(loan.state).held)
    return f"self.stages[{loan.home}]" + path.removeprefix("self")
