"""The scheduler as text, and as a program: outputs and gradients equal those of the model run on each micro-batch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.codegen.scheduler.forward_scheduler import emit_scheduler
from fxpipe.codegen.scheduler.schedule_grid import draw_clock
from fxpipe.codegen.scheduler.value_locations import torch_device
from fxpipe.codegen.stage.stage_file import emit_stage
from fxpipe.engines.local.forward_engine import Pipeline
from fxpipe.ir.graph.graph import Op
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.program.program import Loan, Program, check
from fxpipe.passes import PassContext
from fxpipe.passes.recompute import recompute
from fxpipe.runtime import Stage
from fxpipe.runtime.random import mix

MakeGraph = Callable[..., Any]
MakeProgram = Callable[..., Program]


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
    stages = zip(program.stages, modes, strict=True)
    planned = tuple(StagePlan(tuple(op.name for op in stage.ops), stage.device, mode) for stage, mode in stages)
    program = replace(program, stages=tuple(replace(stage, checkpoint="never") for stage in program.stages))
    return recompute(program, PassContext(Plan(program.graph.model, planned, 1)))


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
        device = torch.device(torch_device(stage.device))
        for path in kind.states:
            tensors[path].data = tensors[path].data.to(device)
        stages.append(kind({path: tensors[path] for path in kind.states}, {}, device))
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


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize(
    "devices", [("cuda:0",) * 4, ("cuda:0", "cpu:0", "cuda:0", "cpu:1"), ("cpu:0",) + ("cuda:0",) * 3]
)
def test_equals_the_model_on_cuda(
    make_graph: MakeGraph, make_program: MakeProgram, mode: str, devices: Sequence[str]
) -> None:
    model, program = skip_program(make_graph, make_program, devices)
    plain = deepcopy(model)
    pipe = build(with_checkpoint(program, mode), model, 3)
    image = torch.randn(7, 4).double()
    expected = plain(image)
    outputs = [output.cpu() for output in pipe.run((image,), 3)]
    torch.testing.assert_close(outputs, list(expected))
    got = [grad.cpu() for grad in gradients(outputs, model)]
    torch.testing.assert_close(got, gradients(expected, plain))
    pipe.close()


# Text -----------------------------------------------------------------------------------------------------------------


def test_golden_of_cpu_workers(
    make_graph: MakeGraph, make_program: MakeProgram, golden: Callable[[str, str], None]
) -> None:
    """One stage of each kind: recomputed without and with inputs to join, kept, always recomputed."""
    _, program = skip_program(make_graph, make_program)
    modes = with_checkpoint(program, "except_last", "never", "always", "except_last")
    golden("scheduler/cpu.py", emit_scheduler(modes, 4))


def test_golden_of_cuda_devices(
    make_graph: MakeGraph, make_program: MakeProgram, golden: Callable[[str, str], None]
) -> None:
    """A skip to a second user on its own device and to one on another, and the CPU at the end."""
    _, program = skip_program(make_graph, make_program, ("cuda:0", "cuda:1", "cuda:0", "cpu:0"))
    golden("scheduler/cuda.py", emit_scheduler(with_checkpoint(program, "never"), 4))


def test_golden_of_a_loan_and_draws(
    make_graph: MakeGraph, make_program: MakeProgram, golden: Callable[[str, str], None]
) -> None:
    _, program = words_program(make_graph, make_program, ("cuda:0", "cuda:1", "cuda:2"))
    golden("scheduler/loan.py", emit_scheduler(with_checkpoint(program, "except_last"), 4))


def every_program(make_graph: MakeGraph, make_program: MakeProgram) -> list[Program]:
    layouts = [(), ("cuda:0", "cuda:1", "cuda:0", "cpu:0"), ("cpu:0", "cuda:0", "cuda:0", "cuda:1")]
    skips = [skip_program(make_graph, make_program, devices)[1] for devices in layouts]
    words = [words_program(make_graph, make_program, devices[:3])[1] for devices in layouts]
    return [with_checkpoint(p, mode) for p in (*skips, *words) for mode in ("never", "except_last", "always")]


def test_text_is_clean_short_lined_and_the_same_each_time(
    make_graph: MakeGraph, make_program: MakeProgram, tmp_path: Path
) -> None:
    programs = every_program(make_graph, make_program)
    for number, program in enumerate(programs):
        text = emit_scheduler(program, 4)
        assert text == emit_scheduler(program, 4)
        assert max(map(len, text.splitlines())) <= 110
        (tmp_path / f"scheduler{number}.py").write_text(text)
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["--isolated", "--line-length", "110", "--target-version", "py311"]
    found = subprocess.run([*ruff, "check", *rules, "--select", "E,F,W,I,B,UP,SIM", tmp_path], capture_output=True)
    assert found.returncode == 0, found.stdout.decode()
    found = subprocess.run([*ruff, "format", *rules, "--diff", tmp_path], capture_output=True)
    assert found.returncode == 0, found.stdout.decode()


def test_cpu_programs_know_nothing_of_cuda(make_graph: MakeGraph, make_program: MakeProgram) -> None:
    for program in every_program(make_graph, make_program):
        if all(device.startswith("cpu") for device in program.devices):
            text = emit_scheduler(program, 4)
            assert not any(word in text for word in ("cuda", "stream", "copy", "wait", ".to("))


def test_a_value_is_copied_once_to_each_device_and_let_go(make_graph: MakeGraph, make_program: MakeProgram) -> None:
    #   x on cuda:0 ── 1 on cuda:1 ── 2 on cuda:1 ── 3 on cuda:0: all use `tanh`, made on cuda:0
    class Fan(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            skip = torch.tanh(x)
            x = torch.relu(skip)
            x = x * skip
            return x + skip

    devices = ("cuda:0", "cuda:1", "cuda:1", "cuda:0")
    program = make_program(make_graph(Fan(), torch.ones(2, 4, requires_grad=True)), 1, 2, 3, devices=devices)
    moves = tuple(replace(m, source=1) if (m.value, m.target) == ("tanh", 2) else m for m in program.moves)
    text = emit_scheduler(with_checkpoint(replace(program, moves=moves), "never"), 4)
    copies = [line.strip() for line in text.splitlines() if "= copy(" in line]
    assert [line.partition(" = ")[0] for line in copies] == ["m[i].x", "m[i].tanh_on_cuda1", "m[i].mul"]
    released = [line.strip() for line in text.splitlines() if line.strip().startswith("del ")]
    assert released == [
        "del m[i].x  # used for the last time",
        "del m[i].relu, m[i].tanh_on_cuda1  # used for the last time",
        "del m[i].mul, m[i].tanh  # used for the last time",
    ]


def test_the_clock_is_drawn_as_far_as_the_page_goes() -> None:
    picture = draw_clock(["cuda:0", "cuda:1"], 64)
    assert all(line.endswith("...") and len(line) <= 106 for line in picture.splitlines())
    assert draw_clock(["cpu:0", "cpu:0"], 2).splitlines() == [
        "clock             0   1   2",
        "cpu:0, stage 0   F0  F1",
        "cpu:0, stage 1       F0  F1",
    ]


def test_names_that_python_cannot_use(make_graph: MakeGraph, make_program: MakeProgram) -> None:
    _, program = skip_program(make_graph, make_program)
    text = emit_scheduler(rename_all(program, {"mul": "lambda", "image": "_x"}), 2)
    compile(text, "scheduler", "exec")
    assert "m[i].lambda_" in text
    assert 'inputs = (("x", 0),)' in text


def rename_all(program: Program, names: dict[str, str]) -> Program:
    """The moves, takes, gives, inputs and types with other names; the ops are not looked at here."""
    new = names.get
    graph = replace(
        program.graph, inputs=tuple(replace(item, name=new(item.name, item.name)) for item in program.graph.inputs)
    )
    stages = tuple(
        replace(
            stage,
            takes=tuple(new(name, name) for name in stage.takes),
            gives=tuple(new(name, name) for name in stage.gives),
        )
        for stage in program.stages
    )
    moves = tuple(replace(move, value=new(move.value, move.value)) for move in program.moves)
    types = {new(name, name): kind for name, kind in program.types.items()}
    return replace(program, graph=graph, stages=stages, moves=moves, types=types)


def test_values_without_gradient_do_not_get_one(make_graph: MakeGraph, make_program: MakeProgram) -> None:
    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            mask = (x > 0).float()
            h = torch.tanh(self.fc(x))
            return h * mask, mask

    model = Mask()
    program = make_program(make_graph(model, torch.ones(2, 4)), 4)
    pipe = build(with_checkpoint(program, "always"), model, 2)
    y, mask = pipe.run((torch.randn(4, 4),), 2)
    assert y.requires_grad
    assert not mask.requires_grad
    pipe.close()


def test_a_stage_that_backward_never_reaches_is_not_recomputed(
    make_graph: MakeGraph, make_program: MakeProgram
) -> None:
    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.fc(x)
            index = h.argmax(1)
            return torch.tanh(h), index

    program = make_program(make_graph(Dead(), torch.ones(2, 4)), 1, 2)
    text = emit_scheduler(with_checkpoint(program, "always"), 2)
    assert [stage.gives for stage in program.stages] == [("linear",), ("argmax",), ("tanh",)]
    assert "checkpoint(self.stages[0]" in text
    assert "m[i].argmax = self.stages[1].forward(m[i].linear)" in text
    assert "for j in (0, 2):" in text
