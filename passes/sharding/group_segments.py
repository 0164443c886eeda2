"""Groups segments into stages of the pipeline, where ops were placed one by one.

Devices that can reach each other both ways by moves form one stage; a new stage begins where values only go forward.
"""

from __future__ import annotations

from dataclasses import replace

from fxpipe.ir.program.program import Program
from fxpipe.passes.pass_context import PassContext


def group_segments(program: Program, context: PassContext) -> Program:
    """The program with `pipeline`: for each of its stages (segments), the stage of the pipeline that it belongs to."""
    return replace(program, pipeline=_groups(program)) if context.segmented else program


def _groups(program: Program) -> tuple[int, ...]:
    reaches: dict[str, set[str]] = {device: {device} for device in program.devices}
    for segment, sources_ in reversed(list(enumerate(program.sources))):
        for source in sources_:
            reaches[program.devices[source]].add(program.devices[segment])
    for _ in reaches:  # iterate to the transitive closure
        for there in reaches.values():
            there |= set().union(*(reaches[device] for device in there))
    groups = {device: frozenset(d for d in there if device in reaches[d]) for device, there in reaches.items()}
    # A group comes after all groups that reach it, which reach more devices.
    order = sorted(dict.fromkeys(groups.values()), key=lambda group: -len(reaches[next(iter(group))]))
    return tuple(order.index(groups[device]) for device in program.devices)
