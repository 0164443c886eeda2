"""What a pass of the user returns is checked; errors have its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import PlanError
from fxpipe.ir.program.program import Program
from fxpipe.passes import PassContext

X = torch.randn(4, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def same(program: Program, context: PassContext) -> Program:
    return program


def elsewhere(program: Program, context: PassContext) -> Program:
    return replace(program, stages=tuple(replace(stage, device="cpu:7") for stage in program.stages))


def no_outputs(program: Program, context: PassContext) -> Program:
    return replace(program, graph=replace(program.graph, outputs=()))


def without_relu(program: Program, context: PassContext) -> Program:
    stages = tuple(replace(s, ops=tuple(op for op in s.ops if op.name != "relu")) for s in program.stages)
    return replace(program, stages=stages)


def without_weights(program: Program, context: PassContext) -> Program:
    stages = tuple(replace(stage, states=()) for stage in program.stages)
    return replace(program, stages=stages)


def without_layer(program: Program, context: PassContext) -> Program:
    def change(op: object) -> object:
        name = getattr(op, "name", "")
        return replace(op, target=torch.clone, args=op.args[:1]) if name.startswith("linear") else op  # type: ignore

    stages = tuple(replace(stage, ops=tuple(map(change, stage.ops))) for stage in program.stages)
    return replace(program, stages=stages)  # type: ignore[arg-type]


def nothing(program: Program, context: PassContext) -> None:
    return None


def failing(program: Program, context: PassContext) -> Program:
    raise KeyError("conv")


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (elsewhere, "puts the stages on cpu:7, cpu:7, and the plan on cpu:0, cpu:1"),
        (no_outputs, "changes the outputs of the graph, which must stay"),
        (without_relu, "makes a program that cannot run: "),
        (without_weights, "leaves out first_weight of stage 0, a tensor of the model"),
        (without_layer, "leaves out first_weight of stage 0, a tensor of the model"),
        (nothing, "returns NoneType; return the Program"),
        (failing, "raises KeyError: 'conv'"),
    ],
)
def test_a_wrong_one_is_refused_by_name(run: Callable[..., object], says: str) -> None:
    pipe = fxpipe.compile(Net(), 2, 2, passes=[same, run])
    with pytest.raises(PlanError, match=rf"passes: {run.__name__} \(test_user_passes.py:\d+\) {says}"):
        pipe.prepare(X)
    pipe.close()


def test_two_of_one_name() -> None:
    with pytest.raises(PlanError, match="there is another pass of the name 'same'"):
        fxpipe.compile(Net(), 2, 2, passes=[same, same]).prepare(X)
