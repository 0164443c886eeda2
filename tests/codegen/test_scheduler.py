"""The scheduler as text, and as a program: outputs and gradients equal those of the model run on each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.codegen.scheduler import emit_scheduler
from fxpipe.codegen.stage import emit_stage
from fxpipe.engines.local import Pipeline
from fxpipe.ir.graph import Op
from fxpipe.ir.program import Loan, Program, check
from fxpipe.runtime import Stage
from fxpipe.runtime.random import mix

MakeGraph = Callable[..., Any]
MakeProgram = Callable[..., Program]
CPU = torch.device("cpu")


class Skip(nn.Module):
    """A skip over two stages, with users in two stages, and a branch that leaves early."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.up = nn.Linear(4, 4)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        skip = torch.tanh(self.down(image))
        x = torch.relu(skip)
        x = self.middle(x)
        early = torch.sigmoid(x)
        y = torch.tanh(x * early)
        y = self.up(y) + skip
        return y * skip, early


class Words(nn.Module):
    """Token ids come in, and the embedding is used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, ids: Tensor) -> Tensor:
        h = F.embedding(ids, self.embed.weight)
        h = torch.tanh(self.layers[0](h))
        h = F.dropout(h, 0.5, True)
        h = torch.tanh(self.layers[1](h))
        return F.linear(h, self.embed.weight)


def with_checkpoint(program: Program, *modes: str) -> Program:
    n = len(program.stages)
    modes = modes * n if len(modes) == 1 else modes
    stages = tuple(replace(stage, checkpoint=mode) for stage, mode in zip(program.stages, modes, strict=True))
    return replace(program, stages=stages)


def with_draws(program: Program) -> Program:
    numbers = iter(range(100))

    def drawing(op: Op) -> Op:
        return replace(op, draw=next(numbers)) if op.target is F.dropout else op

    stages = tuple(replace(stage, ops=tuple(map(drawing, stage.ops))) for stage in program.stages)
    return replace(program, stages=stages)


def with_loan(program: Program, state: str, home: int, user: int) -> Program:
    stages = list(program.stages)
    held = tuple(name for name in stages[user].states if name != state)
    stages[user] = replace(stages[user], states=held, borrows=(state,))
    return replace(program, stages=tuple(stages), loans=(Loan(state, home, user),))


def load(source: str, name: str) -> Any:
    space: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), space)
    return space


def build(program: Program, model: nn.Module, chunks: int) -> Pipeline:
    """The program's files, run."""
    check(program)
    stages = []
    for stage in program.stages:
        kind: type[Stage] = load(emit_stage(program, stage.index), "stage")[f"Stage{stage.index}"]
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        stages.append(kind({path: tensors[path] for path in kind.states}, {}, CPU))
    pipe: Pipeline = load(emit_scheduler(program, chunks), "scheduler")["Scheduler"](stages)
    return pipe


def skip_program(make_graph: MakeGraph, make_program: MakeProgram, devices: Sequence[str] = ()) -> tuple[Skip, Program]:
    model = Skip().double()
    return model, make_program(make_graph(model, torch.ones(2, 4).double()), 2, 4, 6, devices=devices)


def words_program(
    make_graph: MakeGraph, make_program: MakeProgram, devices: Sequence[str] = ()
) -> tuple[Words, Program]:
    model = Words().double()
    program = make_program(make_graph(model, torch.ones(2, 3, dtype=torch.int64)), 2, 5, devices=devices)
    return model, with_loan(with_draws(program), "embed_weight", 0, len(program.stages) - 1)


def gradients(outputs: Sequence[Tensor], model: nn.Module) -> list[Tensor]:
    torch.manual_seed(5)
    loss = sum((output * torch.randn_like(output)).sum() for output in outputs)
    return list(torch.autograd.grad(loss, list(model.parameters())))


MODES = [
    ("never",), ("except_last",), ("always",),
    ("except_last", "never", "always", "never"), ("never", "always", "except_last", "always"),
]  # fmt: skip


@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize("devices", [(), ("cpu:0", "cpu:1", "cpu:0", "cpu:1"), ("cpu:0",) * 4], ids=["4", "2", "1"])
@pytest.mark.parametrize(("batch", "chunks"), [(6, 3), (7, 3), (2, 4), (5, 1)])
def test_equals_the_model(
    make_graph: MakeGraph,
    make_program: MakeProgram,
    modes: tuple[str, ...],
    devices: Sequence[str],
    batch: int,
    chunks: int,
) -> None:
    model, program = skip_program(make_graph, make_program, devices)
    pipe = build(with_checkpoint(program, *modes), model, chunks)
    image = torch.randn(batch, 4).double()
    expected = [torch.cat(pieces) for pieces in zip(*map(model, image.tensor_split(min(chunks, batch))), strict=True)]
    outputs = pipe.run((image,), chunks)
    torch.testing.assert_close(list(outputs), expected)
    torch.testing.assert_close(gradients(outputs, model), gradients(expected, model))
    with torch.no_grad():
        torch.testing.assert_close(list(pipe.run((image,), chunks)), expected)
    pipe.close()


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_ids_dropout_and_a_shared_weight(make_graph: MakeGraph, make_program: MakeProgram, mode: str) -> None:
    model, program = words_program(make_graph, make_program)
    pipe = build(with_checkpoint(program, mode), model, 3)
    ids = torch.randint(7, (7, 3))
    torch.manual_seed(1)
    (logits,) = pipe.run((ids,), 3)
    torch.manual_seed(1)
    seed = int(torch.randint(1 << 62, ()).item())
    expected = []
    for i, piece in enumerate(ids.tensor_split(3)):
        with torch.random.fork_rng():
            torch.manual_seed(mix(seed, i, 0))
            expected.append(model(piece))
    torch.testing.assert_close(logits, torch.cat(expected))
    torch.testing.assert_close(gradients([logits], model), gradients([torch.cat(expected)], model))
    pipe.close()
