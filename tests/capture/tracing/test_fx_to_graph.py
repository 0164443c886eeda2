"""What a graph says of each op: names, types, writes, regions, lines."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxpipe import backend
from fxpipe.capture import capture
from fxpipe.ir.graph.evaluate_graph import evaluate
from fxpipe.ir.graph.legal_cuts import legal_cuts
from fxpipe.ir.graph.value_types import TupleType
from tests.helpers.marks import mostly_slow


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return F.relu(self.fc(x), inplace=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4)
        self.head.weight = self.layers[0].fc.weight
        self.norm = nn.BatchNorm1d(4)
        self.scale = torch.ones(4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, lambda_, batch, **more):
        x = self.layers[1](self.layers[0](lambda_ * self.scale))
        with torch.no_grad():
            self.steps += 1
        early = x[:, 0]
        x[:, 1] = 2.0
        x = self.norm(x)
        x.mul_(2)
        with torch.autocast("cpu", torch.bfloat16):
            y = F.dropout(self.head(x), 0.5)
        return y + batch["ids"] + early[:, None] + more["extra"]


def net():
    x = torch.randn(6, 4)
    return capture(Net(), (x, {"ids": x.clone()}), {"extra": x.clone()})


LISTING = """
Net, train
  input   lambda_: f32[b, 4]
  input   batch_ids: f32[b, 4]
  input   extra: f32[b, 4]
  size    b = lambda_.shape[0]
  constant   scale: f32[4]  scale
  parameter  layers_0_fc_weight: f32[4, 4]  layers.0.fc.weight = head.weight
  parameter  layers_0_fc_bias: f32[4]  layers.0.fc.bias
  parameter  layers_1_fc_weight: f32[4, 4]  layers.1.fc.weight
  parameter  layers_1_fc_bias: f32[4]  layers.1.fc.bias
  buffer     steps: f32[]  steps
  buffer     norm_num_batches_tracked: i64[]  norm.num_batches_tracked
  buffer     norm_running_mean: f32[4]  norm.running_mean
  buffer     norm_running_var: f32[4]  norm.running_var
  parameter  norm_weight: f32[4]  norm.weight
  parameter  norm_bias: f32[4]  norm.bias
  parameter  head_bias: f32[4]  head.bias
  mul = mul(lambda_, scale): f32[b, 4]
  linear = linear(mul, layers_0_fc_weight, layers_0_fc_bias): f32[b, 4]
  relu = relu(linear, inplace=True): f32[b, 4]  [writes linear]
  linear_1 = linear(relu, layers_1_fc_weight, layers_1_fc_bias): f32[b, 4]
  x = relu(linear_1, inplace=True): f32[b, 4]  [writes linear_1]
  iadd = iadd(steps, 1): f32[]  [grad(False); writes steps]
  early = getitem(x, (:, 0)): f32[b]
  x_1 = setitem(x, (:, 1), 2.0): f32[b, 4]  [writes x, early]
  norm_num_batches_tracked_1 = .add_(norm_num_batches_tracked, 1): i64[]  [writes norm_num_batches_tracked]
  x_2 = batch_norm(x_1, norm_running_mean, norm_running_var, norm_weight, norm_bias, True, 0.1, 1e-05): f32[b, 4]
  x_3 = .mul_(x_2, 2): f32[b, 4]  [writes x_2]
  linear_2 = linear(x_3, layers_0_fc_weight, head_bias): bf16[b, 4]
  y = dropout(linear_2, 0.5): bf16[b, 4]  [draw 0]
  add = add(y, batch_ids): f32[b, 4]
  getitem_1 = getitem(early, (:, None)): f32[b, 1]
  add_1 = add(add, getitem_1): f32[b, 4]
  add_2 = add(add_1, extra): f32[b, 4]
  output  add_2
"""


def test_listing():
    marks = "autocast(cpu, torch.bfloat16, True, None)", "writes norm_running_mean, norm_running_var"
    text = str(net())
    for mark in marks:
        assert mark in text
        text = text.replace(f"  [{mark}]", "").replace(f"[{mark}; ", "[")
    assert [line.split("  @ ")[0] for line in text.splitlines()] == LISTING.strip("\n").splitlines()


def test_origins():
    origins = {op.name: op.origin for op in net().ops}
    assert str(origins["relu"]).endswith("return F.relu(self.fc(x), inplace=True)")
    assert str(origins["y"]).startswith("test_fx_to_graph.py:")
    assert [origins[name].module for name in ("linear", "relu", "x_2", "y")] == ["layers.0.fc", "layers.0", "norm", ""]
    assert origins["linear"].code == "return F.relu(self.fc(x), inplace=True)"
    assert origins["x_2"].code == "x = self.norm(x)"


def test_template_of_the_call():
    graph = net()
    assert str(graph.call) == "((lambda_, {'ids': batch_ids}), {'extra': extra})"
    assert [item.path for item in graph.inputs] == ["lambda_", "batch['ids']", "extra"]


def test_types_know_gradients():
    types = net().types
    assert not types["mul"].grad
    assert types["linear"].grad


def test_an_argument_that_is_called_b():
    class Named(nn.Module):
        def forward(self, b, self_):
            return b.view(b.shape[0], 2, 2) * 2, self_

    graph = capture(Named(), (torch.randn(6, 4), torch.randn(6)))
    assert [(item.name, item.path) for item in graph.inputs] == [("b_1", "b"), ("self_", "self_")]
    assert [size.name for size in graph.sizes] == ["b"]


def test_what_nobody_uses_is_left_out():
    class Wasteful(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            F.dropout(self.spare(x), 0.5)
            return F.dropout(self.fc(x), 0.5)

    graph = capture(Wasteful(), (torch.randn(6, 4),))
    assert [(op.name, op.draw) for op in graph.ops] == [("linear_1", None), ("dropout_1", 1)]
    assert [state.path for state in graph.states] == ["fc.weight", "fc.bias"]


def test_what_nobody_needs_is_left_out():
    class Dead(nn.Module):
        def forward(self, x):
            unused = torch.arange(x.shape[1]).float() + 1
            noise = torch.rand(4)
            unused.sum(), noise
            return x * 2

    graph = capture(Dead(), (torch.randn(6, 4, requires_grad=True),))
    assert [op.name for op in graph.ops] == ["mul"]


def test_a_vmap_stays_whole():
    class Mapped(nn.Module):
        def forward(self, x):
            double = torch.vmap(lambda row: torch.vmap(lambda v: v * 2)(row).cumsum(0))
            return double(x.relu()).exp()

    x = torch.randn(6, 4)
    graph = capture(Mapped(), (x,))
    inside = [op.name for op, legal in zip(graph.ops, legal_cuts(graph), strict=False) if not legal]
    names = [op.name for op in graph.ops]
    entered, *_, left = (i for i, name in enumerate(names) if "crement_nesting" in name)
    assert inside == names[entered + 1 : left + 1]
    values = evaluate(graph, {graph.inputs[0].name: x}, {})
    torch.testing.assert_close(values[graph.outputs[0].value], Mapped()(x))


def test_derivatives_are_refused_in_graphs_that_torch_compile_has_made():
    class Slope(Block):
        def forward(self, x):
            return self.fc(torch.func.grad(lambda v: v.pow(2).sum())(self.fc(x)))

    model, x = Slope(), torch.randn(6, 4)
    with pytest.warns(UserWarning, match=r"runs as it is(?s:.*)torch.func.grad(?s:.*)takes derivatives inside"):
        found = torch.compile(model, backend=backend.backend, options={"devices": 2, "chunks": 2})(x)
    torch.testing.assert_close(found, model(x))


@pytest.mark.parametrize("kind", mostly_slow([nn.LSTM, nn.GRU, nn.RNN], [nn.GRU].__contains__))
def test_a_long_sequence_is_traced_as_fast_as_a_short_one(kind):
    class Listens(nn.Module):
        def __init__(self):
            super().__init__()
            self.ear = nn.Linear(4, 4)
            self.rnn = kind(4, 8, num_layers=2, batch_first=True, bidirectional=True, dropout=0.5)

        def forward(self, x):
            return self.rnn(self.ear(x))[0]

    start = time.process_time()
    graph = capture(Listens(), (torch.randn(6, 1000, 4),))
    assert time.process_time() - start < 20  # all steps take minutes
    assert str(graph.types[graph.outputs[0].value]) == "f32[b, 1000, 16]"
    assert [op.random for op in graph.ops if isinstance(op.type, TupleType)] == [True]
    assert sum(op.random for op in capture(Listens().eval(), (torch.randn(6, 10, 4),)).ops) == 0
