"""A stage that is traced op by op is what it is when traced whole; and like ops are traced once, however many there
are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.program.program import Program, Stage
from fxpipe.passes import lower
from fxpipe.passes.backward.tracing import trace_stage
from fxpipe.passes.backward.tracing.compose_trace import ComposedTracing
from fxpipe.passes.backward.tracing.op_traces import OpTrace
from fxpipe.passes.backward.tracing.trace_whole import WholeTracing
from tests.helpers.backward_nets import Block
from tests.helpers.coded_programs import coded
from tests.helpers.marks import mostly_slow
from tests.helpers.models import MODELS
from tests.helpers.nets import plan
from tests.helpers.random_models import example_of
from tests.whole.test_steps import graph_of

WHOLE = (WholeTracing,)
COMPOSED = (ComposedTracing,)
QUICK = ("dropout", "in place", "views", "mixed precision", "counter")


def lowered(monkeypatch: pytest.MonkeyPatch, tracings: tuple[type, ...], graph: Graph, plan: Plan) -> list[Any]:
    """The stages and all that is known of their backwards, traced in this way."""
    monkeypatch.setattr(trace_stage, "TRACINGS", tracings)
    program = lower(graph, plan, backward="code", sizes={"b": 3})
    backwards = [stage.backward for stage in program.stages]
    return [program.stages, dict(program.types), [one and (one.memory, one.scattered, one.orders) for one in backwards]]


def check(monkeypatch: pytest.MonkeyPatch, graph: Graph, plan: Plan) -> None:
    wanted = lowered(monkeypatch, WHOLE, graph, plan)
    assert lowered(monkeypatch, (*COMPOSED, *WHOLE), graph, plan) == wanted


@pytest.mark.parametrize("name", mostly_slow(MODELS, QUICK.__contains__, every=3))
def test_a_composed_trace_is_the_whole_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    graph = graph_of(name)
    check(monkeypatch, graph, plan(graph, len(graph.ops)))


@pytest.mark.parametrize("seed", mostly_slow(range(30), lambda seed: seed < 8))
def test_of_random_models_too(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    example = example_of(seed)
    check(monkeypatch, replace(example.graph, loss=example.graph.outputs[-1].value), example.plan)


class Deep(nn.Module):
    """Blocks of a transformer, with writes in place between them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(5) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            h = norm(block(x))
            h += x
            x = torch.relu_(h)
        return x


class Filled(nn.Module):
    """Layers that write what they compute into a tensor, place by place, as gated delta rules do."""

    def __init__(self, layers: int, spoil: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.spoil = spoil

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out, h = torch.zeros_like(x), layer(x)
            squared = h.square() if self.spoil == "read before" else h
            view = h[:, 0] if self.spoil == "seen by a view" else None
            for place in range(3):
                out[:, place] = torch.tanh(h[:, place] + (out[:, place - 1] if self.spoil == "read between" else 1))
            if self.spoil:
                h[:, 1] = out[:, 0]
            out[:, 3:] = h[:, 3:]
            x = out + squared + (0 if view is None else view[:, None])
        return x


@pytest.mark.parametrize("spoil", ["", "written", "read before", "read between", "seen by a view"])
def test_what_is_written_by_its_index(monkeypatch: pytest.MonkeyPatch, spoil: str) -> None:
    graph = coded(Filled(2, spoil), torch.randn(6, 5, 8)).graph
    check(monkeypatch, graph, plan(graph, len(graph.ops)))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often ops have been traced, and their backwards."""
    counts = Counter[str]()

    def counting(name: str) -> Any:
        inner = getattr(OpTrace, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return inner(*args)

        return call

    for name in ("_run", "_backward"):
        monkeypatch.setattr(OpTrace, name, counting(name))
    monkeypatch.setattr(trace_stage, "TRACINGS", COMPOSED)
    return counts


@pytest.mark.parametrize("kind", [Deep, Filled])
def test_deeper_models_need_no_more_traces(counted: Counter[str], kind: type[nn.Module]) -> None:
    found = []
    for layers in (3, 6):
        counted.clear()
        program = coded(kind(layers), torch.randn(6, 5, 8))
        assert program.stages[0].backward is not None, program.stages[0].autograd_because
        found.append(dict(counted))
    assert found[0] == found[1]


def test_stages_share_the_traces_of_like_ops(counted: Counter[str]) -> None:
    model, x = Deep(6), torch.randn(6, 5, 8)
    ops = len(coded(model, x).graph.ops)
    one = dict(counted)
    counted.clear()
    stages = coded(model, x, cut=ops // 2).stages
    assert all(stage.backward is not None for stage in stages)
    new = {name: count - one[name] for name, count in counted.items()}
    assert all(2 * new[name] < one[name] for name in one)  # only what reads the value that moves between them


class Spoiled(nn.Module):
    """Writes what backward reads."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.fc, self.late = nn.Linear(8, 8), late

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        y = h.exp()
        return y.add_(1) if self.late else h.add_(1) + y


def first_stage(monkeypatch: pytest.MonkeyPatch, tracings: tuple[type, ...], late: bool) -> Stage:
    monkeypatch.setattr(trace_stage, "TRACINGS", tracings)
    program: Program = coded(Spoiled(late), torch.randn(6, 8))
    return program.stages[0]


def test_a_value_that_backward_reads_must_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled = first_stage(monkeypatch, COMPOSED, late=True)
    assert spoiled.backward is None
    assert "modified by an inplace operation" in spoiled.autograd_because
    fine = first_stage(monkeypatch, COMPOSED, late=False)
    assert fine.backward is not None, fine.autograd_because
