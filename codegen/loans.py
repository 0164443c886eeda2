"""Tensors of the model that one stage owns and others use too: tied weights, a shared table.

They are lent once a run. Between CPU workers that is a name for the same tensor; on another device it is a copy, whose
gradient, summed over the micro-batches, comes back once.
"""

from __future__ import annotations

from fxpipe.codegen.lines import INDENT, WIDTH
from fxpipe.codegen.names import clip, identifier, prose, state_path
from fxpipe.codegen.places import torch_device, unused
from fxpipe.codegen.stage import constant_names
from fxpipe.codegen.statements import assign, moved
from fxpipe.ir.program import Loan, Program


def lend(program: Program) -> list[str]:
    """The method that lends tensors from one stage to another, once a run."""
    if not program.loans:
        return []
    lines = [f"{INDENT}def lend(self, m: Batches) -> None:"]
    shown = set()
    for loan in program.loans:
        name = lent_name(program, loan)
        if name in shown:
            continue
        shown.add(name)
        users = [str(other.user) for other in program.loans if lent_name(program, other) == name]
        why = f"stage {loan.home} owns it, stage {' and '.join(users)} uses it too; their gradients add up"
        lines.append(clip(f"{INDENT * 2}# {prose(program.state(loan.state).path)}: {why}", WIDTH))
        lines += _lend(f"m.lent.{name}", _owned(program, loan), *_devices(program, loan), loan.user)
    return lines


def _lend(place: str, owned: str, here: str, there: str, user: int) -> list[str]:
    """The tensor on the borrower's device; a path that is too long for the line gets one of its own."""
    if here != there:
        return assign([place], moved(owned, user, there), 2)
    if len(f"{INDENT * 2}{place} = {owned}") <= WIDTH:
        return assign([place], owned, 2)
    return [*assign(["owned"], owned, 2), *assign([place], "owned", 2)]


def _devices(program: Program, loan: Loan) -> tuple[str, str]:
    return torch_device(program.devices[loan.home]), torch_device(program.devices[loan.user])


def lent_name(program: Program, loan: Loan) -> str:
    """The attribute of `m.lent` that holds the tensor on the borrower's device."""
    states = [state.name for state in program.graph.states]
    names: dict[str, str] = {}
    for state in states:
        names[state] = unused(identifier(state), names.values())
    home, user = _devices(program, loan)
    return names[loan.state] + ("" if home == user else f"_on_{user.replace(':', '')}")


def _owned(program: Program, loan: Loan) -> str:
    """The tensor in the stage that owns it."""
    constants = constant_names(program)
    held = constants.get(loan.state)
    path = f"self.{held}" if held else state_path(program.state(loan.state).path)
    return f"self.stages[{loan.home}]" + path.removeprefix("self")
