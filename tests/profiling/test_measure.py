"""Measuring: what is counted equals what autograd keeps for the whole model, and nothing of the model changes."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, Region, Size
from fxpipe.ir.graph.value_types import ScalarType, TensorType
from fxpipe.ir.plan.profile import check, total
from fxpipe.profiling.measure import measure
from tests.helpers.profiling_graphs import trace


class Branches(nn.Module):
    """A skip, an in-place ReLU, batch norm, dropout, a tuple, a buffer that counts, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        skip = F.relu(self.first(x), inplace=True)
        norm = self.norm
        y = torch.batch_norm(
            self.second(skip), norm.weight, norm.bias, norm.running_mean, norm.running_var, True, 0.1, 1e-5, False
        )
        y = y + skip
        a, b = y.chunk(2, 1)
        y = torch.cat([torch.sigmoid(a), b.tanh()], 1).flatten(2).transpose(1, 2)
        best = y.argmax(-1)
        return F.dropout(self.head(y), 0.5) * best.unsqueeze(-1)


MODELS = {
    "mlp": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)), (5, 4)),
    "inplace": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Sigmoid()), (5, 4)),
    "branches": (Branches(), (3, 2, 6, 6)),
}


@pytest.fixture(params=MODELS)
def case(request):
    torch.manual_seed(0)
    model, shape = MODELS[request.param]
    return model, torch.randn(shape)


def kept(model: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps for one forward of the model, each memory once, without the model's own tensors."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: dict[int, tuple[int, Tensor]] = {}

    def pack(t: Tensor) -> Tensor:
        found[t.untyped_storage().data_ptr()] = (t.untyped_storage().nbytes(), t)  # alive: no address comes again
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        result = model(x)
    assert result.requires_grad
    return sum(size for memory, (size, _) in found.items() if memory not in own)


def test_saved_bytes_are_what_autograd_keeps(case):
    model, x = case
    graph, inputs, states = trace(model, x)
    profile = measure(graph, inputs, states, repeats=1)
    check(profile, [op.name for op in graph.ops])
    assert total(profile.ops).saved == kept(model, x)
    assert total(profile.ops).parameters == sum(4 * p.numel() for p in model.parameters())
    assert profile.batch == len(x)


def test_nothing_changes(case):
    model, x = case
    x.requires_grad_()
    graph, inputs, states = trace(model, x)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_hook(lambda grad: pytest.fail("a hook of the user's ran"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copy, random = x.detach().clone(), torch.get_rng_state()
    measure(graph, inputs, states)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad.eq(1).all() for parameter in model.parameters())
    assert torch.equal(x, copy)
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), random)


def test_times_by_op():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 400), nn.Linear(400, 4000), nn.Flatten())
    graph, inputs, states = trace(model, torch.randn(200, 4))
    costs = measure(graph, inputs, states).ops
    assert max(costs, key=lambda cost: cost.forward) == costs[2] == max(costs, key=lambda cost: cost.backward)
    assert [cost.output for cost in costs] == [4 * 200 * size for size in (4, 400, 4000, 4000)]
    assert all(cost.forward > 0 and cost.backward > 0 for cost in costs)


HERE, ROW = Origin("net.py", 1, "", ""), TensorType("f32", ("b", 4), "cpu", True)


def hand(*ops: Op) -> Graph:
    given, size = Input("x", "x", ROW, 0), Size("b", "x", 0)
    return Graph("Net", True, (given,), (size,), (), ops, (Output(ops[-1].name, 0),), (), Ref(ops[-1].name))


def test_regions_and_sizes():
    off = (Region("grad", (False,)),)
    half = (Region("autocast", ("cpu", torch.bfloat16, True, None)),)
    product = Op("y", torch.matmul, (Ref("x"), Ref("t")), {}, ROW, HERE, half)
    graph = hand(
        Op("n", operator.mul, (Ref("b"), 2), {}, ScalarType("int"), HERE),
        Op("t", torch.transpose, (Ref("x"), 0, 1), {}, ROW, HERE, off),
        product,
        Op("z", torch.mul, (Ref("y"), Ref("n")), {}, ROW, HERE),
    )
    n, t, y, z = measure(graph, {"x": torch.randn(6, 4, requires_grad=True)}, {}).ops
    assert (n.output, n.backward, t.backward) == (0, 0.0, 0.0)
    assert y.output == 2 * 6 * 6  # bf16
    assert y.backward > 0
    assert z.backward > 0


def test_a_write_is_seen_through_all_views():
    x = torch.zeros(2, 4)
    graph = hand(
        Op("a", torch.add, (Ref("x"), 1), {}, ROW, HERE),
        Op("v", "view", (Ref("a"), 8), {}, ROW, HERE),
        Op("a1", operator.setitem, (Ref("a"), slice(0, 1), 7.0), {}, ROW, HERE, (), ("a", "v")),
        Op("s", "sum", (Ref("v"),), {}, ROW, HERE),
        Op("i", torch.full, ((2,), Ref("s")), {}, ROW, HERE),
        Op("y", "view", (Ref("i"), 2, 1), {}, ROW, HERE),
    )
    seen = []
    spy = replace(graph.ops[-1], target=lambda value, *shape: seen.append(value.tolist()) or value.view(*shape))
    measure(replace(graph, ops=(*graph.ops[:-1], spy)), {"x": x}, {}, repeats=1)
    assert seen[-1] == [32.0, 32.0]
    assert x.eq(0).all()


def test_writing_the_callers_input_is_done_in_a_copy():
    x = torch.zeros(2, 4)
    graph = hand(
        Op("v", "view", (Ref("x"), 8), {}, ROW, HERE), Op("y", "add_", (Ref("v"), 1), {}, ROW, HERE, (), ("v",))
    )
    measure(graph, {"x": x}, {})
    assert x.eq(0).all()


def test_the_budget_bounds_the_repeats():
    runs = []
    graph = hand(Op("y", lambda x: runs.append(1) or x * 2, (Ref("x"),), {}, ROW, HERE))
    measure(graph, {"x": torch.randn(2, 4)}, {}, repeats=1000, budget=0.0)
    assert len(runs) == 2  # one that is timed and one for the result


def test_inference_mode_is_no_obstacle():
    model = nn.Linear(4, 4)
    with torch.inference_mode():
        x = torch.randn(2, 4)
        graph, inputs, states = trace(model, torch.randn(2, 4))
        assert (
            measure(graph, {"input": x} if "input" in inputs else {next(iter(inputs)): x}, states).ops[0].backward > 0
        )


@pytest.mark.cuda
def test_on_cuda():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(8, 2))
    graph, inputs, states = trace(model, torch.randn(5, 4))
    random = torch.cuda.get_rng_state()
    on_cuda, on_cpu = measure(graph, inputs, states, "cuda:0"), measure(graph, inputs, states)
    assert [cost.output for cost in on_cuda.ops] == [cost.output for cost in on_cpu.ops]
    assert all(cost.forward > 0 and cost.backward > 0 for cost in on_cuda.ops)
    assert torch.equal(torch.cuda.get_rng_state(), random)
