"""The question that every test of passes asks in the end: does the program still compute what the graph computes?"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.ir.graph.evaluate_graph import evaluate
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.program.program import Program
from tests.helpers.evaluate_program import evaluate_program, evaluate_stage

Values = dict[str, Any]


def draw(number: int) -> AbstractContextManager[None]:
    torch.default_generator.manual_seed(number)
    return nullcontext()


def numbers(graph: Graph, model: nn.Module, x: Tensor, run: Callable[[Values, Values], Values]) -> Values:
    """Outputs, gradients and buffers after `run(inputs, states)`, on copies of the model and the batch."""
    model = copy.deepcopy(model)
    leaf = x.clone().requires_grad_()
    states = {state.name: operator.attrgetter(state.path)(model) for state in graph.states}
    results = run({graph.inputs[0].name: leaf * 1}, states)
    results = {name: value for name, value in results.items() if isinstance(value, Tensor)}
    loss = sum(value.sin().sum() for value in results.values() if value.requires_grad)
    assert isinstance(loss, Tensor), "no output needs a gradient"
    loss.backward()
    grads = {f"grad of {name}": value.grad for name, value in [("input", leaf), *model.named_parameters()]}
    return results | {name: value for name, value in grads.items() if value is not None} | dict(model.named_buffers())


def of_graph(graph: Graph, model: nn.Module, x: Tensor) -> Values:
    def run(inputs: Values, states: Values) -> Values:
        values = evaluate(graph, inputs, states, draw)
        return {output.value: values[output.value] for output in graph.outputs}

    return numbers(graph, model, x, run)


def of_program(program: Program, model: nn.Module, x: Tensor, runtime: Mapping[str, Any] | None = None) -> Values:
    return numbers(
        program.graph, model, x, lambda inputs, states: evaluate_program(program, inputs, states, draw, runtime)
    )


def assert_same(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def assert_repeatable(program: Program, model: nn.Module, x: Tensor) -> None:
    """Every stage leaves what it takes as it was, and computes the same a second time, from the same takes, with
    arbitrary contents in the buffers it mutates but does not read again."""
    graph, model = program.graph, copy.deepcopy(model)
    tensors = {state.name: operator.attrgetter(state.path)(model) for state in graph.states}
    tensors = {name: value.detach().clone() for name, value in tensors.items()}
    arrived: Values = {graph.inputs[0].name: x.clone()} | {size.name: len(x) for size in graph.sizes}
    for stage in program.stages:
        taken = {name: _snapshot(arrived[name]) for name in stage.takes}
        again = {
            name: value.clone()
            if name not in stage.mutates or name in stage.rereads
            else torch.full_like(value, 7)  # arbitrary
            for name, value in tensors.items()
        }
        first = evaluate_stage(stage, arrived, tensors, draw, {}, "cpu")
        for name, value in taken.items():
            assert_same({name: arrived[name]}, {name: value})
        second = evaluate_stage(stage, arrived, again, draw, {}, "cpu")
        gives = {name: _snapshot(first[name]) for name in stage.gives}
        assert_same({name: second[name] for name in stage.gives}, gives)
        for name in stage.mutates:  # what the next micro-batch does must not show in what has been given
            tensors[name].add_(5)
        assert_same({name: first[name] for name in stage.gives if name not in tensors},
                    {name: value for name, value in gives.items() if name not in tensors})  # fmt: skip
        arrived |= gives


def _snapshot(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
