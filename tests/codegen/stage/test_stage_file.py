"""Stage files: a few goldens for the eye, numbers for the rest."""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxpipe.codegen.stage.stage_file import emit_stage
from fxpipe.codegen.text.op_text import EmitError
from fxpipe.ir.graph.check_graph import check
from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, Region, Size, State
from fxpipe.ir.graph.value_types import ObjectType, ScalarType, TensorType, TupleType, ValueType
from fxpipe.ir.program.program import Loan, Move, Program, RuntimeCall, Stage
from fxpipe.runtime import Draws

F32 = TensorType("f32", ("b", 4), "cpu", grad=True)
X, Y = Ref("x"), Ref("y")


def op(name: str, target: Any, *args: Any, line: int = 1, kind: ValueType = F32, **options: Any) -> Op:
    known = {key: options.pop(key) for key in ("writes", "regions", "draw") if key in options}
    code = options.pop("code", f"line {line}")
    return Op(name, target, args, options, kind, Origin("net.py", line, code, ""), **known)


def program(
    *ops: Op,
    gives: tuple[str, ...] = (),
    states: tuple[State, ...] = (),
    inputs: tuple[str, ...] = ("x",),
    **facts: Any,
) -> Program:
    """A program of one stage."""
    sizes = (Size("b", "x", 0),)
    gives = gives or (ops[-1].name,)
    outputs = tuple(Output(name, 0) for name in gives)
    result = tuple(map(Ref, gives))
    call = (tuple(map(Ref, inputs)), {})
    arguments = tuple(Input(name, name, F32, 0) for name in inputs)
    graph = Graph("Net", True, arguments, sizes, states, ops, outputs, call, result)
    check(graph)
    used = {name for item in ops for name in item.reads}
    takes = (*inputs, *(["b"] if "b" in used else []))
    stage = Stage(0, "cpu:0", ops, takes, gives, tuple(s.name for s in states), **facts)
    moves = (*(Move(name, -1, 0) for name in inputs), *(Move(name, 0, 1) for name in gives))
    return Program(graph, (stage,), moves, (), graph.types)


def body(made: Program) -> str:
    """What stands in forward, without its indentation."""
    text = emit_stage(made, 0)
    lines = text[text.index("    def forward") :].splitlines()[1:]
    return "\n".join(line[8:] for line in lines if not line.startswith("        # "))


def load(source: str, index: int = 0) -> Any:
    space: dict[str, Any] = {}
    exec(compile(source, f"stage{index}.py", "exec"), space)
    return space[f"Stage{index}"]


# Goldens --------------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True)


class Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.norm = Norm(after)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = Block(1, 4), Block(4, 4), Block(8, 2)

    def forward(self, image: Tensor) -> Tensor:
        skip = self.down(image)
        x = F.max_pool2d(skip, 2)
        x = self.middle(x)
        x = F.interpolate(x, scale_factor=2)
        return self.up(torch.cat([x, skip], dim=1))


LINES = {
    "down": (12, "skip = self.down(image)"),
    "max_pool2d": (13, "x = F.max_pool2d(skip, 2)"),
    "middle": (14, "x = self.middle(x)"),
    "interpolate": (15, "x = F.interpolate(x, scale_factor=2)"),
    "cat": (16, "return self.up(torch.cat([x, skip], dim=1))"),
    "up": (16, "return self.up(torch.cat([x, skip], dim=1))"),
}


def unet_origin(node: fx.Node) -> Origin:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    module = stack[-1][0] if stack else ""
    line, code = LINES.get(module.partition(".")[0] or node.name, (12, ""))
    return Origin("/home/someone/unet.py", line, code, module)


@pytest.fixture
def unet(tools: SimpleNamespace) -> tuple[UNet, Program]:
    torch.manual_seed(0)
    model = UNet()
    graph = tools.graph_of(model, torch.rand(2, 1, 8, 8), origin=unet_origin)
    made = tools.cut(graph, 4, 7, devices=("cuda:0", "cuda:1", "cuda:2"))
    return model, made


def test_golden_unet(
    unet: tuple[UNet, Program], golden: Callable[[str, str], None], linted: Callable[[str], None]
) -> None:
    _, made = unet
    for j in range(3):
        source = emit_stage(made, j, "forward 1.9 ms, backward 3.7 ms (measured, b = 8)" if j == 0 else "")
        linted(source)
        golden(f"codegen/unet/stage{j}.py", source)


def everything() -> Program:
    """One stage with a bit of each: regions, draws, in-place ops, tuples, borrowed tensors, constants, numbers."""
    weight = TensorType("f32", (4, 4), "cpu", grad=True)
    states = (
        State("layers_0_weight", "layers.0.weight", "parameter", weight),
        State("seen", "seen", "buffer", TensorType("i64", (), "cpu")),
        State("scale", "scale", "constant", TensorType("f32", (), "cpu"), value=torch.tensor(2.0)),
        State("embed_weight", "embed.weight", "parameter", weight),
    )
    no_grad, half = Region("grad", (False,)), Region("autocast", ("cuda", torch.bfloat16, True, None))
    pair = TupleType((F32, F32))
    ops = (
        op("add", operator.iadd, Ref("seen"), 1, line=10, code="self.seen += 1", writes=("seen",)),
        op("h", F.linear, X, Ref("layers_0_weight"), line=11, code="h = self.layers[0](x)"),
        op("h_1", F.dropout, Ref("h"), 0.1, True, False, line=12, code="h = self.drop(h)  # noqa", draw=3),
        op("zeros", torch.zeros, Ref("b"), 4, line=13, code="h[:, 0] = h.new_zeros(...)"),
        op("h_2", operator.setitem, Ref("h_1"), (slice(None), 0), 0.0, line=13, code="h[:, 0] = 0", writes=("h_1",)),
        op("mul", operator.mul, Ref("h_2"), Ref("scale"), line=14, code="with torch.no_grad(): h *= scale"),
        op("h_3", operator.iadd, Ref("mul"), Ref("zeros"), line=15, code="h += zeros", writes=("mul",)),
        op("softmax", F.softmax, Ref("h_3"), -1, line=16, code="a = F.softmax(h)", regions=(no_grad, half)),
        op("log", "log", Ref("softmax"), line=17, code="a = a.log()", regions=(no_grad, half)),
        op("chunk", torch.chunk, Ref("log"), 2, 1, line=18, code="p, q = torch.chunk(a, 2)", kind=pair),
        op("p", operator.getitem, Ref("chunk"), 0, line=18, code="p, q = torch.chunk(a, 2)"),
        op("q", operator.getitem, Ref("chunk"), 1, line=18, code="p, q = torch.chunk(a, 2)"),
        op("cat", torch.cat, [Ref("q"), Ref("p")], line=19, code="y = torch.cat([q, p], dim=1)", dim=1),
        op("y", F.linear, Ref("cat"), Ref("embed_weight"), line=20, code="return y @ self.embed.weight.T"),
    )
    made = program(*ops, states=states, mutates=("seen",), rereads=("seen",))
    first = replace(made.stages[0], index=1, borrows=("embed_weight",), states=("layers_0_weight", "seen", "scale"))
    empty = Stage(0, "cpu:0", (), ("x",), ("x",), ("embed_weight",))
    moves = (Move("x", -1, 0), Move("x", 0, 1), Move("y", 1, 2))
    return replace(made, stages=(empty, first), moves=moves, loans=(Loan("embed_weight", 0, 1),))


def test_golden_everything(golden: Callable[[str, str], None], linted: Callable[[str], None]) -> None:
    source = emit_stage(everything(), 1)
    linted(source)
    golden("codegen/everything/stage1.py", source)


def test_the_same_to_the_byte(unet: tuple[UNet, Program]) -> None:
    assert len({emit_stage(unet[1], 1) for _ in range(3)}) == 1
    assert "/home" not in "".join(emit_stage(unet[1], j) for j in range(3))


# Names and statements -------------------------------------------------------------------------------------------------


def test_a_plain_name_is_used_again_when_the_old_value_is_dead() -> None:
    made = program(op("x_1", "relu", X), op("x_2", "exp", Ref("x_1")), op("out", operator.add, Ref("x_2"), Ref("x_1")))
    assert body(made) == "x = x.relu()\nx_2 = x.exp()\nout = x_2 + x\nreturn out"


def test_in_place_ops_keep_the_variable() -> None:
    made = program(
        op("h", "relu", X),
        op("add_", "add_", Ref("h"), 1, writes=("h",)),
        op("set_1", operator.setitem, Ref("add_"), 0, 2.0, writes=("add_",)),
        op("set_2", operator.imul, Ref("set_1"), X, writes=("set_1",)),
        op("y", "exp", Ref("set_2")),
    )
    assert body(made) == "h = x.relu()\nh.add_(1)\nh[0] = 2.0\nh *= x\ny = h.exp()\nreturn y"


def test_an_in_place_result_that_leaves_has_its_own_name() -> None:
    made = program(op("h", "relu", X), op("y", operator.setitem, Ref("h"), 0, 2.0, writes=("h",)))
    assert body(made) == "h = x.relu()\nh[0] = 2.0\ny = h\nreturn y"


def test_results_that_nobody_reads() -> None:
    made = program(op("a", "relu", X), op("c", operator.add, X, 1), op("y", "exp", X))
    assert body(made) == "x.relu()\n_ = x + 1\ny = x.exp()\nreturn y"


def test_tuples_are_taken_apart_only_if_every_item_is_read_once() -> None:
    pair = TupleType((F32, F32))
    first, second = op("m", operator.getitem, Ref("t"), 0), op("i", operator.getitem, Ref("t"), 1)
    top = op("t", torch.max, X, 1, kind=pair)
    assert "m, i = torch.max(x, dim=1)\ny = m + i" in body(
        program(top, first, second, op("y", operator.add, Ref("m"), Ref("i")))
    )
    assert "t = torch.max(x, dim=1)\nm = t[0]\ny = m + m" in body(
        program(top, first, op("y", operator.add, Ref("m"), Ref("m")))
    )


def test_long_paths_are_written_in_two_steps(linted: Callable[[str], None]) -> None:
    long = "swin.encoder.layers.0.blocks.1.attention.relative_position_bias"
    held = TensorType("f32", (4, 4), "cpu")
    table = State("table", f"{long}.relative_position_bias_table", "parameter", held)
    index = State("index", f"{long}.relative_position_index", "buffer", held)
    short = State("short", "encoder.layers.0.blocks.1.attention.bias", "buffer", held)
    made = program(
        op("attention", torch.add, X, X),
        op("bias", operator.getitem, Ref("table"), Ref("index"), line=2),
        op("count", operator.iadd, Ref("index"), 1, line=3, writes=("index",)),
        op("view", "view", Ref("short"), 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, line=4),
        gives=("attention", "bias", "view"),
        states=(table, index, short),
    )
    source = emit_stage(made, 0)
    linted(source)
    written = [line.strip() for line in body(made).splitlines()]
    assert "attention_ = self.swin.encoder.layers[0].blocks[1].attention" in written
    assert "bias = attention_.relative_position_bias.relative_position_bias_table[" in written
    assert "attention_.relative_position_bias.relative_position_index.add_(1)" in written
    assert any(line.startswith("view = attention_.bias.view(1, 2") for line in written)


def test_names_that_python_or_the_file_need() -> None:
    made = program(
        op("input", "relu", X),
        op("torch", torch.exp, Ref("input")),
        op("lambda_", "exp", Ref("torch")),
        op("draw", "exp", Ref("lambda_")),
        op("l", "exp", Ref("draw")),
        op("Stage0", "exp", Ref("l")),
        op("F", "exp", Ref("Stage0")),
    )
    text = emit_stage(made, 0)
    stage = load(text)({}, {}, torch.device("cpu"))
    x = torch.rand(2, 4)
    assert torch.equal(stage(x), x.relu().exp().exp().exp().exp().exp().exp())


def test_large_tensors_are_let_go_of_before_the_end() -> None:
    made = program(
        op("a", "relu", X), op("c", "exp", Ref("a")), op("d", "exp", Ref("c"), line=2), op("y", "exp", X, line=3)
    )
    assert body(made) == "a = x.relu()\nc = a.exp()\ndel a\n\nd = c.exp()\n\ny = x.exp()\nreturn y".replace(
        "d = c.exp()\n", "c.exp()\ndel c\n"
    )


def test_a_view_keeps_its_memory_so_both_are_let_go_of_together() -> None:
    made = program(
        op("a", "relu", X),
        op("v", "view", Ref("a"), -1),
        op("e", "sum", Ref("v"), kind=TensorType("f32", (), "cpu")),
        op("y", operator.add, X, Ref("e"), line=2),
    )
    assert "v = a.view(-1)\ne = v.sum()\ndel a, v\n" in body(made)


def test_what_was_copied_is_let_go_of_at_once() -> None:
    half = op("h", "to", Ref("a"), torch.float16, kind=TensorType("f16", ("b", 4), "cpu"))
    index = op("i", "argmax", X, kind=TensorType("i64", ("b",), "cpu"))
    rows = op("h", operator.getitem, Ref("a"), Ref("i"))
    for copied in ((half,), (index, rows)):
        made = program(op("a", "relu", X), *copied, op("c", "exp", Ref("h")), op("y", "exp", Ref("c"), line=2))
        assert "del a" in body(made).partition("c =")[0]


NASTY = ['"""', "\\", "x\n        import os", "# noqa", "'''", '"); raise SystemExit; ("', "\x00", "\u202e", "é漢"]


@pytest.mark.parametrize("text", NASTY)
def test_nothing_of_the_user_breaks_out(text: str, linted: Callable[[str], None]) -> None:
    path = f"a{text}.b.{text}"
    weight = State("w", path.replace(".", "") + ".weight", "parameter", TensorType("f32", (4,), "cpu", grad=True))
    origin = Origin(f"/x/{text}.py", 3, f"x = {text}", text)
    first = replace(op("h", operator.add, X, Ref("w")), origin=origin)
    keyed = replace(op("t", dict, a=Ref("h"), **{text: text}, kind=ObjectType("dict")), origin=origin)
    item = replace(op("g", operator.getitem, Ref("t"), text, kind=ObjectType("str")), origin=origin)
    made = program(first, keyed, item, op("y", operator.getitem, Ref("t"), "a"), states=(weight,))
    made = replace(made, stages=(replace(made.stages[0], device=f"cpu:{text}"),))
    source = emit_stage(made, 0, text)
    linted(source)
    held = torch.rand(4)
    stage = load(source)({weight.path: held}, {}, torch.device("cpu"))
    x = torch.rand(2, 4)
    assert torch.equal(stage(x), x + held)


def test_calls_of_the_runtime(linted: Callable[[str], None]) -> None:
    states = tuple(State(name, name, "buffer", TensorType("f32", (4,), "cpu")) for name in ("mean", "var"))
    arguments = (X, Ref("mean"), Ref("var"), None, None, None, 0.1, 1e-05)
    written = ("mean", "var")
    source = emit_stage(
        program(op("y", RuntimeCall("deferred_batch_norm"), *arguments, writes=written), states=states), 0
    )
    linted(source)
    assert "from fxpipe.runtime import Stage, deferred_batch_norm\n" in source
    assert "momentum=0.1" in source


def test_regions_that_have_no_context() -> None:
    with pytest.raises(EmitError, match=r"no context is known for the region warp\(1\) of the op 'y', at net\.py:1"):
        emit_stage(program(op("y", "exp", X, regions=(Region("warp", (1,)),))), 0)


# Numbers --------------------------------------------------------------------------------------------------------------


def test_numbers_unet(unet: tuple[UNet, Program], tools: SimpleNamespace) -> None:
    model, made = unet
    made = replace(made, stages=tuple(replace(stage, device="cpu:0") for stage in made.stages))
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    stages = [load(emit_stage(made, j), j)(tensors, {}, torch.device("cpu")) for j in range(3)]
    image = torch.rand(2, 1, 8, 8)
    (found,) = tools.run_stages(made, stages, image)
    mean = model.up.norm.running_mean.clone()
    found.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected = model(image)
    expected.sum().backward()
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, model.parameters(), strict=True))
    assert mean.abs().sum() > 0


def test_numbers_everything(tools: SimpleNamespace) -> None:
    made = everything()
    draws = Draws(1, 0, torch.device("cpu"))
    model = nn.Module()
    model.layers, model.embed = nn.ModuleList([nn.Linear(4, 4, bias=False)]), nn.Embedding(4, 4)
    model.register_buffer("seen", torch.tensor(0))
    x = torch.rand(3, 4)
    ops = [replace(item, regions=()) for item in made.graph.ops]
    expected = tools.evaluate(replace(made.graph, ops=tuple(ops)), model, x, draws=draws)
    assert model.seen == 1
    source = emit_stage(made, 1).replace("torch.autocast(", "torch.autocast(enabled=False, device_type=")
    stage = load(source, 1)(
        dict(model.named_parameters()) | dict(model.named_buffers()), {"scale": torch.tensor(2.0)}, "cpu"
    )
    found = stage(x, 3, model.embed.weight, draws)
    assert torch.equal(found, expected[0])
    assert model.seen == 2


def random_program(seed: int, tools: SimpleNamespace) -> tuple[Program, nn.Module]:
    """Ops of all kinds on values named alike, so that variables are used again as often as can be."""
    pick = random.Random(seed)
    ops: list[Op] = []
    values = ["x"]
    for k in range(pick.randrange(5, 40)):
        a, b = Ref(pick.choice(values[-6:])), Ref(pick.choice(values[-6:]))
        stem = pick.choice(["x", "h", "x_1", "input", "torch", "l"])
        name = f"{stem}_{k}"
        line = pick.choice([1, 2])
        kind = pick.randrange(8)
        if kind == 0 and a.name != "x":
            ops.append(op(name, operator.setitem, a, (slice(None), 0), 0.5, line=line, writes=(a.name,)))
        elif kind == 1 and a.name != "x":
            ops.append(op(name, operator.iadd, a, 0.25, line=line, writes=(a.name,)))
        elif kind == 2 and a.name != "x":
            ops.append(op(name, "mul_", a, 0.5, line=line, writes=(a.name,)))
        elif kind == 3:
            parts = [f"{name}_t", f"{name}_p", f"{name}_q"]
            ops.append(op(parts[0], torch.chunk, a, 2, 1, line=line, kind=TupleType((F32, F32))))
            ops.append(op(parts[1], operator.getitem, Ref(parts[0]), 0, line=line))
            ops.append(op(parts[2], operator.getitem, Ref(parts[0]), pick.choice([1, 1, 0]), line=line))
            ops.append(op(name, torch.cat, [Ref(parts[2]), Ref(parts[1])], dim=1, line=line))
        elif kind == 4:
            ops.append(op(name, torch.tanh, a, line=line, regions=pick.choice([(), (Region("grad", (False,)),)])))
        else:
            ops.append(op(name, pick.choice([operator.add, operator.sub, torch.maximum]), a, b, line=line))
        if ops[-1].writes:
            values = [value for value in values if value != a.name]
        values.append(name)
    gives = tuple(dict.fromkeys(pick.choices(values[-4:], k=2)))
    return program(*ops, gives=gives), nn.Module()


@pytest.mark.parametrize("seed", range(60))
def test_numbers_random(seed: int, tools: SimpleNamespace, request: pytest.FixtureRequest) -> None:
    made, model = random_program(seed, tools)
    x = torch.rand(3, 4)
    expected = tools.evaluate(made.graph, model, x.clone())
    stage = load(emit_stage(made, 0))({}, {}, torch.device("cpu"))
    found = tools.run_stages(made, [stage], x.clone())
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_random_programs_are_linted(tools: SimpleNamespace, tmp_path: Path) -> None:
    files = []
    for seed in range(20):
        files.append(tmp_path / f"stage{seed}.py")
        files[-1].write_text(emit_stage(random_program(seed, tools)[0], 0))
    tools.lint(*files)


def test_many_ops(tools: SimpleNamespace) -> None:
    """Ten thousand ops do not take quadratic time: that would be minutes."""
    names = ["x", *(f"h_{k}" for k in range(10_000))]
    ops = [op(new, torch.add, Ref(old), X, line=k // 3) for k, (old, new) in enumerate(pairwise(names))]
    made = program(*ops)
    start = time.process_time()
    emit_stage(made, 0)
    assert time.process_time() - start < 30


def test_long_signatures_and_scalars(linted: Callable[[str], None]) -> None:
    names = tuple(f"a_rather_long_name_{k}" for k in range(12))
    last = op("total", operator.add, Ref(names[0]), Ref("b"))
    number = op("twice", operator.mul, Ref("b"), 2, kind=ScalarType("int"))
    made = program(last, number, inputs=("x", *names), gives=("total", "twice", *names))
    source = emit_stage(made, 0)
    linted(source)
    assert "-> tuple[Tensor | int, ...]:" in source
    assert "takes  b " in source
    assert "x.shape[0]" in source
