"""Removes relays: a value goes directly from the stage that makes it to the stages that use it (torchgpipe's portals).

    skip  0 -> 1, 1 -> 2, 2 -> 3        becomes        skip  0 -> 3

A value is sent once to each device. If several users are on one device, the first one passes it to the others; on the
device of the stage that made the value, that stage does. Inputs come directly from the caller, and outputs go directly
back.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxpipe.ir.program.program import Move, Program
from fxpipe.passes.connect_stages import wire
from fxpipe.passes.pass_context import PassContext


def portals(program: Program, context: PassContext) -> Program:
    """The program without relays."""
    n = len(program.stages)
    homes: dict[str, int] = {}
    for move in program.moves:
        homes[move.value] = min(move.source, homes.get(move.value, n))
    uses: dict[str, list[int]] = {name: [] for name in homes}
    for stage in program.stages:
        for name in dict.fromkeys(name for op in stage.ops for name in (*op.reads, *op.writes)):
            if name in uses and stage.index > homes[name]:
                uses[name].append(stage.index)
    moves = [move for name, home in homes.items() for move in _straight(program, name, home, uses[name])]
    moves += [Move(output.value, homes[output.value], n) for output in program.graph.outputs]
    return wire(program, [stage.ops for stage in program.stages], moves)


def _straight(program: Program, name: str, home: int, users: list[int]) -> Iterator[Move]:
    devices = program.devices
    if home < 0:
        yield from (Move(name, home, user) for user in users)
        return
    holders = {devices[home]: home}  # device -> the stage that has the value there
    for user in users:
        yield Move(name, holders.get(devices[user], home), user)
        holders.setdefault(devices[user], user)
