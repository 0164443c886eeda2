"""Programs to emit, made without the rooms that make real ones: a tiny module goes through torch.fx, and its ops are
shared out to stages by hand, every value moving straight from where it is made to where it is read."""

from __future__ import annotations

import operator
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, Size, State, map_refs, refs
from fxpipe.ir.graph.value_types import ObjectType, ScalarType, TensorType, TupleType, ValueType
from fxpipe.ir.program.program import Move, Program, Stage

SHORT = {torch.float32: "f32", torch.float64: "f64", torch.int64: "i64", torch.bool: "bool"}


def value_type(value: Any) -> ValueType:
    """The type of an example value; its first dimension is the batch if it has one."""
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        dims = ("b", *shape[1:]) if shape and not isinstance(value, nn.Parameter) else shape
        return TensorType(SHORT[value.dtype], dims, "cpu", value.requires_grad)
    if isinstance(value, (bool, int, float)):
        return ScalarType(type(value).__name__)
    if isinstance(value, tuple):
        return TupleType(tuple(map(value_type, value)))
    return ObjectType(type(value).__name__)


def state_type(value: Tensor) -> TensorType:
    return TensorType(SHORT[value.dtype], tuple(value.shape), "cpu", value.requires_grad)


class _Typed(fx.Interpreter):
    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        node.meta["type"] = value_type(result)
        return result


class _Flat(fx.Tracer):
    """Traces into every module, torch's own too."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return False


def graph_of(model: nn.Module, *example: Any, origin: Callable[[fx.Node], Origin] | None = None) -> Graph:
    """The Graph of a module that torch.fx can trace; `example` are positional arguments."""
    traced = fx.GraphModule(model, _Flat().trace(model))
    _Typed(traced).run(*example)
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    inputs: list[Input] = []
    states: dict[str, State] = {}
    ops: list[Op] = []
    names: dict[str, str] = {}
    result: Any = None

    def ref(node: fx.Node) -> Any:
        return Ref(names[node.name])

    for node in traced.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), ref)
        args, kwargs = _plain(args), _plain(kwargs)
        names[node.name] = node.name
        here = origin(node) if origin else Origin("/home/someone/net.py", 1, "y = self(x)", "")
        if node.op == "placeholder":
            inputs.append(Input(node.name, node.name, node.meta["type"], 0))
        elif node.op == "get_attr":
            name = node.target.replace(".", "_")
            names[node.name] = name
            kind = "parameter" if isinstance(found[node.target], nn.Parameter) else "buffer"
            states[name] = State(name, node.target, kind, state_type(found[node.target]))
        elif node.op == "output":
            result = args[0]
        else:
            writes = _writes(node, args)
            ops.append(Op(node.name, node.target, args, kwargs, node.meta["type"], here, writes=writes))
            if writes and writes[0] not in states:
                names |= {old: node.name for old, new in names.items() if new == writes[0]}
    outputs = tuple(Output(name, 0) for name in dict.fromkeys(ref.name for ref in refs(result)))
    sizes = tuple(Size("b", item.name, 0) for item in inputs[:1])
    call = (tuple(Ref(item.name) for item in inputs), {})
    kinds = (tuple(inputs), sizes, tuple(states.values()), tuple(ops), outputs)
    return Graph(type(model).__name__, model.training, *kinds, call, result)


def _plain(value: Any) -> Any:
    """fx's immutable lists and dicts as Python's own."""
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*map(_plain, (value.start, value.stop, value.step)))
    return value


def _writes(node: fx.Node, args: tuple[Any, ...]) -> tuple[str, ...]:
    in_place = node.target in (operator.iadd, operator.imul, operator.setitem) or node.kwargs.get("inplace")
    in_place = in_place or (node.op == "call_method" and node.target.endswith("_") and not node.target.endswith("__"))
    return (args[0].name,) if in_place else ()


def cut(graph: Graph, *cuts: int, devices: Sequence[str] = ()) -> Program:
    """The ops of `graph` in stages that begin at the positions `cuts`."""
    bounds = [0, *cuts, len(graph.ops)]
    n = len(bounds) - 1
    home = {item.name: -1 for item in graph.inputs}
    stages: list[Stage] = []
    moves: list[Move] = []
    states = {state.name for state in graph.states}
    sizes = {size.name for size in graph.sizes}
    outputs = [output.value for output in graph.outputs]
    for j in range(n):
        ops = graph.ops[bounds[j] : bounds[j + 1]]
        home |= {op.name: j for op in ops}
        read = list(dict.fromkeys(name for op in ops for name in op.reads))
        takes = [name for name in read if name not in states and home.get(name) != j]
        moves += [Move(name, home[name], j) for name in takes if name not in sizes]
        held = tuple(name for name in read if name in states)
        written = tuple(name for op in ops for name in op.writes if name in states)
        device = devices[j] if devices else f"cpu:{j}"
        stages.append(Stage(j, device, ops, tuple(takes), (), held, mutates=written, checkpoint="except_last"))
    moves += [Move(name, home[name], n) for name in outputs]
    given = [tuple(dict.fromkeys(move.value for move in moves if move.source == j)) for j in range(n)]
    stages = [replace(stage, gives=given[stage.index]) for stage in stages]
    return Program(graph, tuple(stages), tuple(moves), (), graph.types)


ROOT = Path(__file__).parents[2]


def lint(*files: Path) -> None:
    """The linter and the formatter have nothing to say about the files."""
    names = [str(file) for file in files]
    options = ["--no-cache", "--config", "pyproject.toml", "--config", "line-length = 110"]
    for command in (["check"], ["format", "--check", "--diff"]):
        run = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options, *names], cwd=ROOT, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture
def linted(tmp_path: Path) -> Callable[[str], None]:
    """`linted(source)`: the source is as the formatter would write it."""

    def check(source: str) -> None:
        file = tmp_path / "linted.py"
        file.write_text(source)
        lint(file)

    return check


def run_stages(program: Program, stages: Sequence[Any], *inputs: Any, draws: Any = None) -> tuple[Any, ...]:
    """The outputs of the stages, one after another, for one micro-batch: what a scheduler does, without the clock."""
    graph = program.graph
    values = dict(zip((item.name for item in graph.inputs), inputs, strict=True))
    values |= {size.name: values[size.input].shape[size.dim] for size in graph.sizes}
    for stage, emitted in zip(program.stages, stages, strict=True):
        random = [draws] if any(op.random for op in stage.ops) else []
        given = emitted(*(values[name] for name in stage.takes), *random)
        given = given if len(stage.gives) > 1 else (given,)
        values |= zip(stage.gives, given, strict=False)
    return tuple(values[output.value] for output in graph.outputs)


def evaluate(graph: Graph, model: nn.Module, *inputs: Any, draws: Any = None) -> tuple[Any, ...]:
    """The outputs of the graph, op by op, without any text."""
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    values = dict(zip((item.name for item in graph.inputs), inputs, strict=True))
    values |= {size.name: values[size.input].shape[size.dim] for size in graph.sizes}
    values |= {s.name: s.value if s.kind == "constant" else tensors[s.path] for s in graph.states}
    for op in graph.ops:
        args, kwargs = map_refs((op.args, dict(op.kwargs)), lambda ref: values[ref.name])
        with draws(op.draw) if op.random else nullcontext():
            if isinstance(op.target, str):
                values[op.name] = getattr(args[0], op.target)(*args[1:], **kwargs)
            else:
                values[op.name] = op.target(*args, **kwargs)
        if op.target is operator.setitem:
            values[op.name] = args[0]
    return tuple(values[output.value] for output in graph.outputs)


@pytest.fixture
def tools() -> SimpleNamespace:
    """The functions of this file, for test files beside it."""
    return SimpleNamespace(graph_of=graph_of, cut=cut, evaluate=evaluate, run_stages=run_stages, lint=lint)


@pytest.fixture
def make_graph() -> Callable[..., Graph]:
    return graph_of


@pytest.fixture
def make_program() -> Callable[..., Program]:
    return cut
