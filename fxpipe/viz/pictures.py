"""How the types of `fxpipe.ir` are drawn, for their `draw` (see `fxpipe/ir/drawable.py`)."""

from __future__ import annotations

from functools import partial

from fxpipe.ir.drawable import picture
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.program.program import Program
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.timeline import Timeline

from . import plan_picture, program_picture, timeline_picture
from .picture_file import Picture


@picture.register
def of_timeline(value: Timeline | Schedule) -> Picture:
    """A row for each device, time to the right."""
    return Picture(value.name, partial(timeline_picture.draw, value), partial(str, value))


@picture.register
def of_program(program: Program) -> Picture:
    """The stages, and the values that move between them."""
    return Picture(program.graph.model, partial(program_picture.draw, program), partial(str, program))


@picture.register
def of_plan(plan: Plan) -> Picture:
    """The stages and their devices."""
    return Picture(plan.model, partial(plan_picture.draw, plan), partial(str, plan))
