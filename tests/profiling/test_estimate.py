"""Estimates: times by hand, bytes beside what is measured."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.ir.cluster.cluster import Device
from fxpipe.ir.cluster.matrix_speed import MatrixSpeed
from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, Size, State
from fxpipe.ir.graph.value_types import ScalarType, TensorType
from fxpipe.ir.plan.profile import check, total
from fxpipe.profiling.estimate import LAUNCH, estimate
from fxpipe.profiling.measure import measure
from tests.helpers.profiling_graphs import trace

CPU = Device("cpu:0", memory=10**9, flops=1e9, bandwidth=1e9)
HERE = Origin("net.py", 1, "", "")


def tensor(*shape: int | str, grad: bool = True) -> TensorType:
    return TensorType("f32", shape, "cpu", grad)


def net(*ops: Op, grad: bool = False) -> Graph:
    x, b = Input("x", "x", tensor("b", 1000, grad=grad), 0), Size("b", "x", 0)
    w = State("w", "fc.weight", "parameter", tensor(500, 1000))
    return Graph("Net", True, (x,), (b,), (w,), ops, (Output(ops[-1].name, 0),), (), Ref(ops[-1].name))


def test_times_by_hand():
    graph = net(
        Op("n", operator.mul, (Ref("b"), 2), {}, ScalarType("int"), HERE),
        Op("y", F.linear, (Ref("x"), Ref("w")), {}, tensor("b", 500), HERE),
        Op("v", "view", (Ref("y"), -1), {}, tensor("500*b"), HERE),
        Op("r", F.relu, (Ref("v"),), {}, tensor("500*b"), HERE),
    )
    n, y, v, r = estimate(graph, {"b": 8}, CPU).ops
    assert (n.forward, n.backward, v.forward, v.backward) == (0, 0, 0, 0)
    product = 2 * 8 * 1000 * 500 / 1e9 + LAUNCH
    assert (y.forward, y.backward) == (pytest.approx(product), pytest.approx(product))  # x needs no gradient
    assert r.forward == pytest.approx(2 * 8 * 500 * 4 / 1e9 + LAUNCH)  # bound by memory
    assert [op.saved for op in (n, y, v, r)] == [0, 8 * 1000 * 4, 0, 8 * 500 * 4]
    assert [op.parameters for op in (n, y, v, r)] == [0, 500 * 1000 * 4, 0, 0]


def test_products_run_at_the_speed_of_their_type():
    fast = replace(CPU, matrices=(MatrixSpeed("f32", 1e10, 0.5), MatrixSpeed("tf32", 4e10)))
    linear = net(Op("y", F.linear, (Ref("x"), Ref("w")), {}, tensor("b", 500), HERE))
    products = 2 * 64 * 1000 * 500
    seconds = [estimate(linear, {"b": 64}, fast, chosen).ops[0].forward - LAUNCH for chosen in (None, "tf32")]
    assert seconds[0] == pytest.approx(products / 5e9)
    assert seconds[1] == pytest.approx(max(products / 4e10, 4 * (64 * 1500 + 1000 * 500) / 1e9))


def test_a_gradient_for_the_input_is_a_second_product():
    linear = Op("y", F.linear, (Ref("x"), Ref("w")), {}, tensor("b", 500), HERE)
    without, needed = (estimate(net(linear, grad=grad), {"b": 8}, CPU).ops[0] for grad in (False, True))
    assert needed.backward == pytest.approx(2 * without.backward)


def test_without_gradients_nothing_is_kept():
    linear = Op("y", F.linear, (Ref("x"), Ref("w")), {}, tensor("b", 500, grad=False), HERE)
    assert estimate(net(linear), {"b": 8}, CPU).ops[0].backward == 0
    assert estimate(net(linear), {"b": 8}, CPU).ops[0].saved == 0


@pytest.mark.parametrize(("training", "kept"), [(True, 8 * 16 * 4), (False, 0)])
def test_dropping_channels_keeps_a_number_for_each(training: bool, kept: int):
    x, b = Input("x", "x", tensor("b", 16, 5, 5), 0), Size("b", "x", 0)
    drop = Op("y", F.dropout2d, (Ref("x"), 0.1, training), {}, tensor("b", 16, 5, 5), HERE)
    graph = Graph("Net", True, (x,), (b,), (), (drop,), (Output("y", 0),), (), Ref("y"))
    assert estimate(graph, {"b": 8}, CPU).ops[0].saved == kept


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.join, self.out = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = self.join(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(1, 2), -1)
        return F.dropout(F.gelu(self.out(weights @ v)), 0.1) + x


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.first(x), inplace=True)
        y = F.max_pool2d(skip, 2)
        y = F.relu(self.second(y))
        return torch.cat([F.interpolate(y, scale_factor=2), skip], 1).flatten(1)


MODELS = {
    "mlp": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh()), torch.randn(6, 4)),
    "attention": (Attention(), torch.randint(11, (4, 6))),
    "convolutions": (Convolutions(), torch.randn(2, 3, 8, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_near_what_is_measured(name):
    model, x = MODELS[name]
    graph, inputs, states = trace(model, x)
    guess, truth = estimate(graph, {}, CPU), measure(graph, inputs, states, repeats=1)
    check(guess, [op.name for op in graph.ops])
    assert [op.output for op in guess.ops] == [op.output for op in truth.ops]
    assert [op.parameters for op in guess.ops] == [op.parameters for op in truth.ops]
    assert total(guess.ops).saved == pytest.approx(total(truth.ops).saved, rel=0.15)
    assert guess.batch == truth.batch


def test_an_lstm():
    kinds = {"u0": (32, 4), "u1": (32, 8)}
    states = tuple(State(n, f"lstm.{n}", "parameter", tensor(*shape)) for n, shape in kinds.items())
    x, zeros = Input("x", "x", tensor(7, 2, 4), 1), Input("h", "h", tensor(1, 2, 8), 1)
    args = (Ref("x"), (Ref("h"), Ref("h")), [Ref("u0"), Ref("u1")], False, 1, 0.0, True, False, False)
    lstm = Op("y", torch.lstm, args, {}, tensor(7, 2, 8), HERE)
    graph = Graph("Net", True, (x, zeros), (), states, (lstm,), (Output("y", 1),), (), Ref("y"))
    profile = estimate(graph, {}, CPU)
    assert profile.ops[0].forward == pytest.approx(2 * 14 * 32 * 12 / 1e9 + LAUNCH)
    assert profile.ops[0].saved > 5 * 4 * 7 * 2 * 8
    assert profile.batch == 2
