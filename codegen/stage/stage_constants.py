"""The names of a stage's tensors in its code: parameters and buffers have their path in the model, constants (tensors
that the model holds elsewhere) a name of their own."""

from __future__ import annotations

from collections.abc import Mapping

from fxpipe.codegen.text.source_names import STAGE_NAMES, identifier, state_path
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.opaque_call import opaques
from fxpipe.ir.once import once
from fxpipe.ir.program.program import Program, Stage


def constant_names(program: Program) -> Mapping[str, str]:
    """The attribute that holds each constant of the program: its name, with underscores appended if that is taken."""
    return _names(program.graph)


@once
def _names(graph: Graph) -> Mapping[str, str]:
    paths = [state.path for state in graph.states if state.kind != "constant"]
    paths += [opaque.called for opaque in opaques(graph)]
    taken = STAGE_NAMES | {path.partition(".")[0] for path in paths}
    names = {}
    for state in graph.states:
        if state.kind == "constant":
            name = identifier(state.name)
            while name in taken:
                name += "_"
            taken |= {name}
            names[state.name] = name
    return names


def state_paths(program: Program, stage: Stage) -> dict[str, str]:
    """The source text of each tensor that the stage owns, by name."""
    constants = constant_names(program)
    return {
        name: f"self.{constants[name]}" if name in constants else state_path(program.state(name).held)
        for name in stage.states
    }
