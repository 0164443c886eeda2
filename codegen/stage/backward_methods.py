"""The methods of a stage whose gradients are computed by code.

    forward          returns what the stage gives, and a list of what backward needs
    backward         takes that list and the gradients of what the stage gave; returns those of what it took, and those
                     of the model's tensors
    input_gradient   the half of it that other stages wait for: returns the gradients of what the stage took, and a list
                     of what the other half needs
    weight_gradient  the other half: returns the gradients of the model's tensors

The lists are emptied by the method that gets them, so that a tensor lives no longer than its variable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from fxpipe.codegen.stage.stage_body import body
from fxpipe.codegen.stage.variables import Variables, assign
from fxpipe.codegen.text.line_layout import Brackets, Doc
from fxpipe.codegen.text.statements import Assign, Block, Statement
from fxpipe.ir.graph.graph import Op
from fxpipe.ir.program.backward import Backward, halves
from fxpipe.ir.program.program import Program, Stage

KINDS = ("B", "I", "W")  # the actions that a schedule may have beside forward


def forward_stage(stage: Stage) -> Stage:
    """The stage as its forward is written: what backward needs has names that stay, as what it gives has."""
    if stage.backward is None:
        return stage
    return replace(stage, gives=(*stage.gives, *(name for name in stage.backward.keeps if name not in stage.gives)))


def forward_result(stage: Stage, variables: Variables) -> Doc | None:
    """What forward returns, if that is more than what the stage gives."""
    if stage.backward is None:
        return None
    given = (variables.of[name] for name in stage.gives)
    return Brackets("", (*given, _list(stage.backward.keeps, variables)), "", "bare")


def backward_methods(
    program: Program, stage: Stage, states: Mapping[str, str], taken: Collection[str], kinds: Collection[str]
) -> Iterator[Block]:
    """The methods for the actions that the schedule has."""
    backward = stage.backward
    if backward is None:
        return
    arriving = tuple(gradient or f"d{name}" for name, gradient in backward.roots)
    takes = tuple(gradient for _, gradient in backward.takes)
    weights = tuple(gradient for _, gradient in backward.weights)
    make = _Maker(program, stage, states, taken)
    if "B" in kinds or not {"I", "W"} & set(kinds):
        yield make.method("backward", backward.keeps, arriving, backward.ops, takes, weights)
    if "I" in kinds:
        parts = halves(backward, program.types)
        yield make.method("input_gradient", backward.keeps, arriving, parts.first, takes, parts.hands)
        yield make.method("weight_gradient", parts.hands, (), parts.second, None, weights)


def _list(names: Sequence[str], variables: Variables) -> Brackets:
    return Brackets("[", tuple(variables.of[name] if name else "None" for name in names), "]", "literal")


class _Maker:
    def __init__(self, program: Program, stage: Stage, states: Mapping[str, str], taken: Collection[str]) -> None:
        self.program, self.stage, self.states, self.taken = program, stage, states, taken

    def method(
        self,
        name: str,
        kept: Sequence[str],
        arriving: Sequence[str],
        ops: tuple[Op, ...],
        takes: Sequence[str] | None,
        weights: Sequence[str],
    ) -> Block:
        """A method that unpacks what was `kept`, runs the ops, and returns the gradients of takes, if it has any, and
        of weights."""
        results = (*(takes or ()), *weights)
        gives = tuple(dict.fromkeys(value for value in results if value))
        stage = replace(self.stage, takes=(*kept, *arriving), borrows=(), gives=gives, ops=ops, backward=None)
        variables = assign(stage, self.program.types, self.states, {*self.taken, "kept"})
        lists = [_list(values, variables) for values in (takes, weights) if values is not None]
        returned: Doc = lists[0] if len(lists) == 1 else Brackets("", tuple(lists), "", "bare")
        arguments = ["self", *(["kept: list[Any]"] if kept else ["_: list[Any]"])]
        arguments += [f"{variables.of[value]}: Tensor" for value in arriving]
        unpack: list[Statement] = []
        if kept:
            names = tuple(variables.of[value] for value in kept)
            unpack += [Assign(names if len(names) > 1 else (f"[{names[0]}]",), "kept"), "kept.clear()"]
        statements = body(
            self.program, stage, variables, returns=returned, about="gradient of ",
            owned=[value for value in kept if value not in gives],
        )  # fmt: skip
        result = "tuple[list[Any], list[Any]]" if len(lists) > 1 else "list[Any]"
        head = Brackets(f"def {name}(", tuple(arguments), f") -> {result}:")
        return Block(head, (*unpack, *statements))


def weight_places(stage: Stage, held: Mapping[str, str]) -> list[str]:
    """For each gradient of a weight, the source of where the weight is: the path or name under which the stage holds
    it, or its place among the arguments of forward."""
    backward = stage.backward
    assert isinstance(backward, Backward)
    return [held[name] if name in held else str(len(stage.takes) + stage.borrows.index(name)) for name, _ in
            backward.weights]  # fmt: skip


__all__ = ["KINDS", "backward_methods", "forward_result", "forward_stage", "weight_places"]
