"""Tensors of the model that one stage owns and others use too: tied weights, a shared table.

They are lent once a run. Between CPU workers that is a name for the same tensor; on another device it is a copy, whose
gradient, summed over the micro-batches, comes back once.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxpipe.codegen.lines import INDENT, WIDTH
from fxpipe.codegen.names import clip, prose, state_path
from fxpipe.codegen.places import Places, torch_device
from fxpipe.codegen.stage import constant_names
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
    for loan in program.loans:
        name = places.lent(loan)
        if loan.user != users[name][0]:
            continue
        stages = " and ".join(map(str, users[name]))
        why = f"stage {loan.home} owns it, stage {stages} uses it too; their gradients add up"
        lines.append(clip(f"{INDENT * 2}# {prose(program.state(loan.state).held)}: {why}", WIDTH))
        here, there = (torch_device(program.devices[index]) for index in (loan.home, loan.user))
        lines += _lend(f"m.lent.{name}", owned(program, loan, constants), here, there, loan.user)
    return lines


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
