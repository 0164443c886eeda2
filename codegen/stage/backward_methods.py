"""The methods of a stage whose gradients are computed by code.

    forward          returns what the stage gives, and a list of what backward needs
    backward         takes that list, the sums of the gradients of the model's tensors until now, and the gradients of
                     what the stage gave; returns those of what it took, and the new sums
    input_gradient   the half of it that other stages wait for: returns the gradients of what the stage took, and a list
                     of what the other half needs
    weight_gradient  the other half: takes the list and the sums; returns the new sums

The lists are emptied by the method that gets them, so that a tensor lives no longer than its variable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fxpipe.codegen.stage.stage_body import GRADIENT_OF, body
from fxpipe.codegen.stage.variables import Variables, assign
from fxpipe.codegen.text.line_layout import Brackets, Doc, prefix
from fxpipe.codegen.text.statements import Assign, Block, Statement
from fxpipe.ir.graph.graph import Op, called
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.program.backward import Backward, accumulated, halves
from fxpipe.ir.program.program import Program, Stage

PRECISE = ("f32", "f64")
KINDS = ("B", "I", "W")  # the actions that a schedule may have beside forward


def forward_stage(stage: Stage) -> Stage:
    """The stage as its forward is written: what backward needs has names that stay, as what it gives has."""
    if stage.backward is None:
        return stage
    return replace(stage, gives=(*stage.gives, *(name for name in stage.backward.keeps if name not in stage.gives)))


def forward_result(stage: Stage, variables: Variables) -> Brackets | None:
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
    make = Maker(program, stage, states, taken)
    if "B" in kinds or not {"I", "W"} & set(kinds):
        yield make.whole().method("backward")
    if "I" in kinds:
        yield from make.halves()


def _list(names: Sequence[str], variables: Variables) -> Brackets:
    return Brackets("[", tuple(variables.of[name] if name else "None" for name in names), "]", "literal")


class Text(NamedTuple):
    """The text of a method of backward: its arguments, how it unpacks what was kept, its ops, the lists that it
    returns; and the names of its variables."""

    arguments: tuple[str, ...]
    unpack: tuple[Statement, ...]
    statements: tuple[Statement, ...]
    lists: tuple[Doc, ...]
    names: frozenset[str]

    def method(self, name: str) -> Block:
        result = "tuple[list[Any], list[Any]]" if len(self.lists) > 1 else "list[Any]"
        head = Brackets(f"def {name}(", ("self", *self.arguments), f") -> {result}:")
        returned = (
            Brackets("return ", self.lists, "", "bare") if len(self.lists) > 1 else prefix("return ", *self.lists)
        )
        return Block(head, (*self.unpack, *self.statements, returned))


class Maker:
    """Makes the methods of backward of a stage. `states`: the source of each tensor that the stage owns; `taken`: names
    that their variables may not have."""

    def __init__(self, program: Program, stage: Stage, states: Mapping[str, str], taken: Collection[str]) -> None:
        assert stage.backward is not None
        self.program, self.stage, self.states, self.taken = program, stage, states, taken
        self.backward = stage.backward
        self.arriving = tuple(gradient or f"d{name}" for name, gradient in self.backward.roots)
        self.takes = tuple(gradient for _, gradient in self.backward.takes)
        self.weights = tuple(gradient for _, gradient in self.backward.weights)

    def whole(self, about: str = GRADIENT_OF) -> Text:
        """Backward in one piece. `about`: what its comments say before the user's line."""
        return self.text(self.backward.keeps, self.arriving, self.backward.ops, (self.takes, self.weights), about)

    def halves(self) -> Iterator[Block]:
        """The methods of backward in two halves."""
        parts = halves(self.backward, self.program.types)
        first = self.text(self.backward.keeps, self.arriving, parts.first, (self.takes, parts.hands), adds=False)
        yield first.method("input_gradient")
        yield self.text(parts.hands, (), parts.second, (self.weights,)).method("weight_gradient")

    def text(
        self,
        kept: Sequence[str],
        arriving: Sequence[str],
        ops: tuple[Op, ...],
        results: Sequence[Sequence[str]],
        about: str = GRADIENT_OF,
        adds: bool = True,
    ) -> Text:
        """A method that unpacks what was `kept`, runs the ops, and returns lists of these results. `adds`: the last one
        is of the gradients of weights, which it adds up."""
        gives = tuple(dict.fromkeys(value for values in results for value in values if value))
        stage = replace(self.stage, takes=(*kept, *arriving), borrows=(), gives=gives, ops=ops, backward=None)
        variables = assign(stage, self.program.types, self.states, {*self.taken, "kept", "sums"})
        sums = accumulators(self.backward, self.program, ops) if adds else {}
        lists = tuple(_list(values, variables) for values in results)
        arguments = ["kept: list[Any]"] if kept else ["_: list[Any]"]
        if adds:
            arguments.append(f"{'sums' if sums else '_sums'}: list[Tensor | None]")
        arguments += [f"{variables.of[value]}: Tensor" for value in arriving]
        unpack: list[Statement] = []
        if kept:
            names = tuple(variables.of[value] for value in kept)
            unpack += [Assign(names if len(names) > 1 else (f"[{names[0]}]",), "kept"), "kept.clear()"]
        *statements, _ = body(
            self.program, stage, variables, returns="", about=about, taken=self.taken,
            owned=[value for value in kept if value not in gives], recomputed=self.backward.recomputed,
            sums=sums,
        )  # fmt: skip
        return Text(tuple(arguments), tuple(unpack), tuple(statements), lists, variables.names)


def accumulators(backward: Backward, program: Program, ops: Sequence[Op]) -> dict[str, Brackets]:
    """For each gradient of a weight that the ops compute and may add up: the function that adds it, and the sum."""
    places, found = accumulated(backward), {}
    for op in ops:
        if op.name in places:
            kind = program.types[op.name]
            # In half precision, a sum that the kernel of the product adds to is rounded once, autograd's twice.
            fused = called(op) == "mm" and isinstance(kind, TensorType) and kind.dtype in PRECISE
            name = "accumulate_mm" if fused else "accumulate"
            found[op.name] = Brackets(f"{name}(", (f"sums[{places[op.name]}]",), ")")
    return found


def accumulating_names(program: Program, stage: Stage) -> set[str]:
    """The functions by which the backward of a stage adds up gradients."""
    if stage.backward is None:
        return set()
    return {call.head[:-1] for call in accumulators(stage.backward, program, stage.backward.ops).values()}


def weight_places(stage: Stage, held: Mapping[str, str]) -> list[str]:
    """For each gradient of a weight, the source of where the weight is: the path or name under which the stage holds
    it, or its place among the arguments of forward."""
    backward = stage.backward
    assert isinstance(backward, Backward)
    return [held[name] if name in held else str(len(stage.takes) + stage.borrows.index(name)) for name, _ in
            backward.weights]  # fmt: skip


__all__ = [
    "KINDS", "Maker", "accumulating_names", "backward_methods", "forward_result", "forward_stage", "weight_places",
]  # fmt: skip
