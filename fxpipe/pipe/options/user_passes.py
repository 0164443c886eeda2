"""Passes that a user adds: what they return is checked more than what ours return, and errors have their names."""

from __future__ import annotations

from functools import wraps
from typing import Any

from fxpipe.errors import FxpipeError, PlanError, of_user
from fxpipe.ir.program import program as programs
from fxpipe.ir.program.program import Program
from fxpipe.passes import PASSES, Pass
from fxpipe.passes.pass_context import PassContext

from .compile_options import Options


def passes_of(options: Options) -> tuple[Pass, ...]:
    """fxpipe's passes, and after them the user's; only the gradients are written out later, as they are those of what
    the user's passes have made. Raises PlanError if two have one name."""
    names = [run.__name__ for run in PASSES]
    for name in (getattr(run, "__name__", type(run).__name__) for run in options.passes):
        if name in names:
            raise PlanError(
                f"passes: there is another pass of the name {name!r}, by which pipe.trail shows it; rename it"
            )
        names.append(name)
    *others, gradients = PASSES
    return (*others, *map(checked, options.passes), gradients)


def checked(run: Any) -> Any:
    """The pass, with PlanError, which names it, if it fails or its program cannot run, or has other inputs, outputs,
    stages, devices, or parameters in a stage than before."""

    @wraps(run)
    def checked_run(program: Program, context: PassContext) -> Program:
        try:
            found = run(program, context)
        except FxpipeError:
            raise
        except Exception as error:
            raise PlanError(f"passes: {of_user(run)} raises {type(error).__name__}: {error}") from error
        if not isinstance(found, Program):
            raise PlanError(f"passes: {of_user(run)} returns {type(found).__name__}; return the Program")
        if (fault := difference(program, found)) is not None:
            raise PlanError(f"passes: {of_user(run)} {fault}")
        return found

    checked_run.__name__ = getattr(run, "__name__", type(run).__name__)
    return checked_run


def difference(old: Program, new: Program) -> str | None:
    """What a pass has changed that must stay, in words; None if nothing."""
    for name in ("inputs", "outputs", "result", "loss", "totals", "epilogue"):
        if getattr(new.graph, name) != getattr(old.graph, name):
            return f"changes the {name} of the graph, which must stay"
    if new.devices != old.devices or [s.replicas for s in new.stages] != [s.replicas for s in old.stages]:
        return f"puts the stages on {', '.join(new.devices)}, and the plan on {', '.join(old.devices)}"
    known = {state.name for state in new.graph.states}
    for before, after in zip(old.stages, new.stages, strict=True):
        if unknown := [state for state in (*after.states, *after.borrows) if state not in known]:
            return f"lets stage {after.index} own {unknown[0]}, which the model does not have"
        kept = {*after.states, *after.borrows}
        lost = [name for name in (*before.states, *before.borrows) if name not in kept]
        unread = {name for op in before.ops for name in op.reads} - {name for op in after.ops for name in op.reads}
        of_model = [s.name for s in old.graph.states if s.kind == "parameter" and s.name in unread and s.name in kept]
        if lost or of_model:
            return f"leaves out {(*lost, *of_model)[0]} of stage {after.index}, a tensor of the model"
    try:
        programs.check(new)
    except ValueError as error:
        return f"makes a program that cannot run: {error}"
    return None
