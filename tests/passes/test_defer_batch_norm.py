"""Deferred batch norm: the same outputs, running statistics of the whole mini-batch, one count."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.errors import PlanError
from fxpipe.ir.graph.graph import Ref
from fxpipe.ir.operators.batch_norm_ops import training_batch_norm
from fxpipe.ir.program.program import Program, RuntimeCall
from fxpipe.passes import cut, lower
from fxpipe.passes.defer_batch_norm import defer_batch_norm
from fxpipe.passes.pass_context import PassContext
from tests.helpers.nets import Chain, Normed, make, plan
from tests.helpers.pass_graphs import trace
from tests.helpers.same_program import assert_same, of_graph, of_program


def lowered(model: Normed, x: Tensor, wanted: bool = True) -> Program:
    graph = trace(model, x)
    return lower(graph, plan(graph, *[len(graph.ops)], deferred_batch_norm=wanted))


def deferred_batch_norm(x: Tensor, mean: Any, var: Any, count: Any, w: Any, b: Any, momentum: Any, eps: Any) -> Tensor:
    """With a single micro-batch, deferring makes no difference: what batch norm does, and one count."""
    count.add_(1)
    return F.batch_norm(x, mean, var, w, b, True, momentum, eps)


def test_training_batch_norm_is_called_by_the_runtime_and_counts_there() -> None:
    model, x = make(Normed)
    ops = lowered(model, x).stages[0].ops
    assert [op.name for op in ops] == ["linear", "batch_norm", "tanh", "linear_1", "batch_norm_1", "add"]
    norm = ops[1]
    assert norm.target == RuntimeCall("deferred_batch_norm")
    names = ("linear", "norm_running_mean", "norm_running_var", "norm_num_batches_tracked", "norm_weight", "norm_bias")
    assert norm.args == (*map(Ref, names), 0.1, 1e-5)
    assert norm.writes == names[1:4]
    assert ops[4].target is F.batch_norm  # in eval mode: nothing to defer


def test_numbers() -> None:
    model, x = make(Normed)
    runtime = {"deferred_batch_norm": deferred_batch_norm}
    graph = trace(model, x)
    chosen = plan(graph, 4, 3, deferred_batch_norm=True)
    found = of_program(lower(graph, chosen), model, x, runtime)
    assert_same(found, of_graph(graph, model, x))
    assert found["norm.num_batches_tracked"] == 1


def test_the_counter_goes_where_its_batch_norm_is() -> None:
    model, x = make(Normed)
    graph = trace(model, x)
    chosen = plan(graph, 2, 5, deferred_batch_norm=True)  # linear, count | batch_norm ...
    first, second = lower(graph, chosen).stages
    assert (first.states, first.mutates) == (("a_weight", "a_bias"), ())
    assert second.states[-1] == "norm_num_batches_tracked"
    assert second.mutates == ("norm_running_mean", "norm_running_var", "norm_num_batches_tracked")
    runtime = {"deferred_batch_norm": deferred_batch_norm}
    assert_same(of_program(lower(graph, chosen), model, x, runtime), of_graph(graph, model, x))


def test_refuses_a_counter_that_something_else_reads() -> None:
    class Watching(Normed):
        def forward(self, x: Tensor) -> Tensor:
            before = x * self.norm.num_batches_tracked.add_(1)
            n = self.norm
            return F.batch_norm(before, n.running_mean, n.running_var, n.weight, n.bias, True)

    model, x = make(Watching)
    graph = trace(model, x)
    with pytest.raises(PlanError, match=r"op add_, at net.py:.* changes norm.num_batches_tracked itself"):
        lower(graph, plan(graph, 2, 1, deferred_batch_norm=True))


def test_unless_the_plan_wants_it_nothing_changes() -> None:
    model, x = make(Normed)
    assert any(op.target is F.batch_norm for op in lowered(model, x, wanted=False).stages[0].ops)
    model, x = make(Chain)
    graph = trace(model, x)
    chosen = plan(graph, 2, 3, deferred_batch_norm=True)
    before = cut(graph, chosen)
    assert defer_batch_norm(before, PassContext(chosen)) is before


def test_a_batch_norm_without_a_counter_is_deferred_too() -> None:
    model, x = make(Normed)
    model = copy.deepcopy(model)
    model.norm.num_batches_tracked = None
    norm = lowered(model, x).stages[0].ops[1]
    assert norm.args[3] is None


def test_refuses_a_momentum_that_is_no_number() -> None:
    class Cumulative(Normed):
        def forward(self, x: Tensor) -> Tensor:
            norm = self.norm
            share = 1.0 / norm.num_batches_tracked.add_(1).item()
            return F.batch_norm(x, norm.running_mean, norm.running_var, None, None, True, share, 1e-5)

    model, x = make(Cumulative)
    with pytest.raises(PlanError, match=r"op add_, at net.py:.*num_batches_tracked"):
        lowered(model, x.requires_grad_())


def test_the_native_spelling_is_read_too() -> None:
    class Native(Normed):
        def forward(self, x: Tensor) -> Tensor:
            n = self.norm
            return torch.batch_norm(x, n.weight, n.bias, n.running_mean, n.running_var, True, 0.2, 1e-3, False)

    model, x = make(Native)
    (found,) = filter(None, map(training_batch_norm, trace(model, x).ops))
    assert (found["running_mean"], found["momentum"], found["eps"]) == (Ref("norm_running_mean"), 0.2, 1e-3)


def test_golden(golden: Callable[[str, str], None]) -> None:
    model, x = make(Normed)
    golden("passes/defer_batch_norm.txt", str(lowered(model, x)))
