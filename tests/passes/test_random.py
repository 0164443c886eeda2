"""Random models, cut at random: after every pass, the program computes what the model computes.

A model is a list of steps over pools of values (rows of 4, halves of 2, cubes of 2 x 2). Steps fan out, reach back any
distance, share parameters, write in place (values, views, inputs, buffers), and make cheap values and tuples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fxpipe.ir.graph.legal_cuts import legal_cuts
from fxpipe.ir.program.program import Program
from fxpipe.passes import lower
from tests.helpers.nets import Norm, plan
from tests.helpers.pass_graphs import trace
from tests.helpers.same_program import assert_repeatable, assert_same, of_graph, of_program

ROW, HALF, CUBE = "row", "half", "cube"


def _rows(x: Tensor) -> Tensor:
    return (torch.arange(x.shape[0], device=torch.device("cpu")) % 2).unsqueeze(1)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros((x.shape[0], 4), dtype=torch.float64)


def _write(a: Tensor) -> Tensor:
    a[:, 1] = 0.5
    return a


# kind: what it takes, what it makes, and how, from the model, its input and what it takes
KINDS: dict[str, tuple[tuple[str, ...], str, Callable[..., Tensor]]] = {
    "add": ((ROW, ROW), ROW, lambda net, x, a, b: a + b),
    "mul": ((ROW, ROW), ROW, lambda net, x, a, b: a * b),
    "scale": ((ROW,), ROW, lambda net, x, a: a * 0.5),
    "sin": ((ROW,), ROW, lambda net, x, a: torch.sin(a)),
    "detach": ((ROW,), ROW, lambda net, x, a: a.detach()),
    "drop": ((ROW,), ROW, lambda net, x, a: F.dropout(a, 0.5, training=True)),
    "linear": ((ROW,), ROW, lambda net, x, a: net.two(a)),
    "tied": ((ROW,), ROW, lambda net, x, a: F.linear(a, net.one.weight)),
    "norm": ((ROW,), ROW, lambda net, x, a: net.norm(a)),
    "mask": ((ROW,), ROW, lambda net, x, a: a * _rows(x)),
    "zeros": ((), ROW, lambda net, x: _zeros(x)),
    "ones": ((), ROW, lambda net, x: _zeros(x).add_(1)),
    "count": ((), ROW, lambda net, x: net.count.add_(1) * x),
    "counted": ((ROW,), ROW, lambda net, x, a: a * net.count),
    "average": ((ROW,), ROW, lambda net, x, a: net.average.mul_(0.9).add_(a.detach().mean(0)) + x),
    "unread": ((ROW,), ROW, lambda net, x, a: (net.average.mul_(0.9).add_(a.detach().mean(0)), a)[1]),
    "part": ((ROW,), HALF, lambda net, x, a: torch.chunk(a, 2, dim=1)[1]),
    "left": ((ROW,), HALF, lambda net, x, a: a[:, :2]),
    "join": ((HALF, HALF), ROW, lambda net, x, a, b: torch.cat([a, b], dim=1)),
    "cube": ((ROW,), CUBE, lambda net, x, a: a.reshape(-1, 2, 2)),
    "flat": ((CUBE,), ROW, lambda net, x, a: a.reshape(-1, 4)),
    "top": ((CUBE,), HALF, lambda net, x, a: a[:, 0]),
    "add_": ((ROW, ROW), ROW, lambda net, x, a, b: a.add_(b)),
    "relu_": ((ROW,), ROW, lambda net, x, a: F.relu(a, inplace=True)),
    "write": ((ROW,), ROW, lambda net, x, a: _write(a)),
    "scale_half_": ((HALF,), HALF, lambda net, x, a: a.mul_(0.5)),
    "scale_cube_": ((CUBE,), CUBE, lambda net, x, a: a.mul_(0.5)),
}
Step = tuple[str, tuple[float, ...]]  # where in its pool each argument is, from 0 to 1


class Random(nn.Module):
    def __init__(self, steps: list[Step], outputs: list[float]) -> None:
        super().__init__()
        self.steps, self.outputs = steps, outputs
        self.one, self.two, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), Norm(4)
        self.register_buffer("count", torch.ones(1))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        pools: dict[str, list[Tensor]] = {ROW: [x], HALF: [], CUBE: []}
        for kind, places in self.steps:
            takes, makes, how = KINDS[kind]
            if all(pools[take] for take in takes):
                args = (_pick(pools[take], place) for take, place in zip(takes, places, strict=False))
                pools[makes].append(how(self, x, *args))
        every = [value for pool in pools.values() for value in pool]
        chosen = {id(value): value for value in (_pick(every, place) for place in self.outputs)}
        return (pools[ROW][-1].mul(1.5) + self.one.bias, *chosen.values())


def _pick(pool: list[Tensor], place: float) -> Tensor:
    return pool[round(place * (len(pool) - 1))]


unit = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0, 1.0])
step = st.tuples(st.sampled_from(sorted(KINDS)), st.tuples(unit, unit))
model = st.builds(Random, st.lists(step, min_size=2, max_size=14), st.lists(unit, max_size=3))


def check(net: Random, data: st.DataObject) -> None:
    net, x = net.double(), torch.rand(6, 4, dtype=torch.float64)
    try:
        graph = trace(net, x)
        expected = of_graph(graph, net, x)
    except RuntimeError:
        assume(False)  # the model itself cannot run, or not backward: it overwrites what backward needs
    assume(not {item.name for item in graph.inputs} & {o.value for o in graph.outputs}
           or not any("x" in op.writes for op in graph.ops))  # fmt: skip
    legal = [position for position, may in enumerate(legal_cuts(graph)) if may and 0 < position < len(graph.ops)]
    cuts = data.draw(st.sets(st.sampled_from(legal), max_size=5)) if legal else set()
    sizes = [after - before for before, after in pairwise([0, *sorted(cuts), len(graph.ops)])]
    devices = tuple(f"cpu:{data.draw(st.integers(0, 2))}" for _ in sizes)
    chosen = plan(graph, *sizes, devices=devices, checkpoint="always")
    trail: dict[str, Program] = {}
    program = lower(graph, chosen, trail.__setitem__)
    for found in trail.values():
        assert_same(of_program(found, net, x), expected)
    assert_repeatable(program, copy.deepcopy(net), x)


relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@settings(relaxed, max_examples=40)
@given(model, st.data())
def test_random_models(net: Random, data: st.DataObject) -> None:
    check(net, data)


@pytest.mark.slow
@settings(relaxed, max_examples=600)
@given(model, st.data())
def test_many_random_models(net: Random, data: st.DataObject) -> None:
    check(net, data)
