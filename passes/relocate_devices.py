"""Replaces the device of capture, where ops name it, by the device of their stage."""

from __future__ import annotations

from dataclasses import replace

from fxpipe.ir.graph.model_devices import capture_device, relocate
from fxpipe.ir.program.program import OWN_DEVICE, Program, Stage
from fxpipe.passes.connect_stages import changed_program
from fxpipe.passes.pass_context import PassContext


def relocate_devices(program: Program, context: PassContext) -> Program:
    """The program with `OWN_DEVICE` wherever an op names the device of capture."""
    device = capture_device(program.graph)
    if device is None:
        return program

    def placed(stage: Stage) -> Stage:
        kind = stage.device.partition(":")[0]
        return replace(stage, ops=tuple(relocate(op, device, OWN_DEVICE, kind) for op in stage.ops))

    return changed_program(program, map(placed, program.stages))
