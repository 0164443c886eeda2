"""The arguments and results of a stage's forward, with their types."""

from __future__ import annotations

from fxpipe.codegen.stage.variables import Variables
from fxpipe.codegen.text.line_layout import WIDTH
from fxpipe.ir.graph.value_types import TensorType, ValueType
from fxpipe.ir.program.program import Program, Stage


def arguments(program: Program, stage: Stage, variables: Variables) -> tuple[str, ...]:
    """The arguments of forward after `self`."""
    found = [f"{variables.of[name]}: {annotation(program.types[name])}" for name in (*stage.takes, *stage.borrows)]
    return (*found, *(["draw: Draws"] if any(op.random for op in stage.ops) else []))


def results(program: Program, stage: Stage, more: int = 1) -> str:
    """The type of what forward returns; where backward is code, `more` lists stand behind what the stage gives."""
    given = [annotation(program.types[name]) for name in stage.gives]
    given += ["list[Any]"] * more if stage.backward is not None else []
    result = f"tuple[{', '.join(given)}]" if len(given) > 1 else given[0] if given else "None"
    return f"tuple[{' | '.join(sorted(set(given)))}, ...]" if len(result) > WIDTH // 2 else result


def annotation(kind: ValueType) -> str:
    return "Tensor" if isinstance(kind, TensorType) else str(kind)
