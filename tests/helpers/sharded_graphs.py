"""A model, its graph and its operators, and what a graph of it gives: outputs, all gradients, buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.capture import capture
from fxpipe.ir.graph.check_graph import check
from fxpipe.ir.graph.dtypes import short_name
from fxpipe.ir.graph.evaluate_graph import evaluate
from fxpipe.ir.graph.graph import Graph, show_op
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.operators.operator_map import Reading
from fxpipe.ir.operators.operators import Operator, OperatorGraph
from fxpipe.ir.operators.placed_graph import Placed
from fxpipe.ir.operators.placed_graph import check as check_placed
from fxpipe.ir.operators.strategy import Config, Strategy, fits
from fxpipe.passes.sharding import shard
from fxpipe.planning.operators.expert_strategies import scattered
from fxpipe.planning.operators.reading.read_operators import read
from fxpipe.planning.operators.strategy_space import fixed

Found = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """A model and its inputs, captured and read; `wanted` is what the plain graph gives."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    graph: Graph
    reading: Reading
    batch: int
    wanted: Found

    def shard(self, strategy: Strategy) -> Placed:
        return shard(self.graph, self.reading, strategy, self.sizes)

    @property
    def sizes(self) -> dict[str, int]:
        return {"b": self.batch}


def sample(model: nn.Module, *inputs: Tensor) -> Sample:
    """The model in double precision; gradients are wanted for all inputs that can have them."""
    model = model.double()
    inputs = tuple(x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs)
    graph = capture(model, inputs, reduce="mean")
    batch = len(inputs[0])
    reading = read(graph, {size.name: inputs[0].shape[size.dim] for size in graph.sizes})
    return Sample(model, inputs, graph, reading, batch, results(model, inputs, graph))


def results(model: nn.Module, inputs: Sequence[Tensor], graph: Graph, typed: bool = False) -> Found:
    """Outputs, gradients of a sum of them that weighs each element by itself, and buffers after the call."""
    parameters = dict(model.named_parameters())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    held = {"parameter": parameters, "buffer": buffers}
    states = {s.name: held[s.kind][s.path] for s in graph.states if s.kind != "constant"}
    values = evaluate(graph, dict(zip([item.name for item in graph.inputs], inputs, strict=True)), states)
    if typed:
        check_types(graph, values)
    outputs = [values[output.value] for output in graph.outputs]
    loss = sum((y * torch.linspace(1, 2, y.numel()).reshape(y.shape)).sum() for y in outputs)
    wanted = {name: x for name, x in parameters.items() if x.requires_grad}
    wanted |= {f"input {at}": x for at, x in enumerate(inputs) if x.requires_grad}
    gradients = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return dict(enumerate(outputs)) | dict(zip(wanted, gradients, strict=True)) | buffers


def check_types(graph: Graph, values: Found) -> None:
    """Every value is of the type that the graph says."""
    for op in graph.ops:
        if isinstance(op.type, TensorType):
            got = values[op.name]
            assert (short_name(got.dtype), tuple(got.shape)) == (op.type.dtype, op.type.shape), show_op(op)
            assert op.type.grad or not got.requires_grad, show_op(op)


def assert_exact(sample: Sample, strategy: Strategy, devices: int) -> Placed:
    """The sharded graph is in order, and gives what the plain one does."""
    placed = sample.shard(strategy)
    check(placed.graph)
    check_placed(placed, devices)
    got = results(sample.model, sample.inputs, placed.graph, typed=True)
    faults = [name for name, value in sample.wanted.items() if not same(got[name], value)]
    assert not faults, f"{faults} differ for\n{strategy}\n{placed.graph}"
    return placed


def same(got: Tensor | None, wanted: Tensor | None) -> bool:
    if got is None or wanted is None:
        return got is wanted
    far = (got - wanted).abs().max().item() if got.numel() else 0.0
    return got.shape == wanted.shape and far <= 1e-9 * max(1e-5, wanted.abs().max().item())


def anyhow(graph: OperatorGraph, devices: int, random: Random, holders: int = 1) -> Strategy:
    """Every operator cut in any dimension that has a role, into parts on any devices, with up to so many holders; or as
    a search would cut it."""
    if random.random() < 0.3 and holders == 1:
        return scattered(graph, devices, random)
    return Strategy(tuple(_anyhow(operator, devices, random, holders) for operator in graph))


def _anyhow(operator: Operator, devices: int, random: Random, holders: int) -> Config:
    if operator.kind == "input":
        return fixed(operator)
    held = 1 if operator.kind == "embedding" else random.randint(1, min(holders, operator.summed or holders))
    left, degrees = random.choice((1, devices, 2 * devices)), [1] * len(operator.output)
    for at in random.sample(range(len(degrees)), len(degrees)):
        most = min(left, operator.sizes[at]) if operator.roles[at] else 1
        degrees[at] = random.choice([d for d in range(1, most + 1) if fits(operator.output[at], d)])
        left //= degrees[at]
    parts = held * int(torch.tensor(degrees).prod())
    return Config(tuple(degrees), tuple(random.randrange(devices) for _ in range(parts)), held)
