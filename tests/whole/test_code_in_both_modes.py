"""With backward as code, one capture serves steps and calls in training and evaluation: a step's graph is the one that
a capture in its mode alone gives, and outputs, gradients, buffers and random numbers are the plain model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import NO_TARGET, StepCapture
from fxpipe.capture.tracing.patches.training_flags import KNOWN
from fxpipe.ir.graph.graph import Graph
from fxpipe.pipe.build import build_cache
from tests.helpers.marks import mostly_slow, slow_in_turn
from tests.helpers.models import MODELS, Case, sequences
from tests.helpers.transparency import assert_same, build, finish, inputs, plain
from tests.whole.test_both_modes import ORDERS, SHARED, SPECIFIC, X, captures, check
from tests.whole.test_shared_traces import ALONE, CHUNKS, all_of
from tests.whole.test_steps import one_step, reference, stepped

pytestmark = pytest.mark.skipif(not KNOWN, reason="this torch has other parts: each program is for one mode")
BY_FLAG = ("dropout", "attention dropout")
BY_MODE = ("batch norm", "resnet", "unet", "amoebanet", "densenet", "other norms", "lstm", "multi-head attention",
           "encoder-decoder", "transformer with dropout")  # fmt: skip


def total(found: Any) -> Tensor:
    parts = found if isinstance(found, tuple) else (found,)
    return torch.stack([part.square().sum() for part in parts]).sum()


class Later(nn.Module):
    """Drops out in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.p = nn.Linear(8, 8), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.a(x), 0.0 if self.training else self.p)


class InPlace(nn.Module):
    """Drops out in place what is read again, between other random numbers, one of which nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.unread = nn.Linear(8, 8), nn.Dropout(0.5, inplace=True), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.unread(x)
        noise = torch.rand_like(x)
        self.drop(y)
        return y + torch.rand_like(y) * noise


OWN: dict[str, Callable[[], nn.Module]] = {**SHARED, "later": Later, **{kind.__name__: kind for kind in SPECIFIC}}


@pytest.mark.parametrize("name", OWN)
def test_the_graph_of_a_step_is_that_of_its_mode(name: str) -> None:
    """Names, arguments, writes and the numbers of random ops included."""
    found: list[Graph] = []
    for both in (True, False):
        model = OWN[name]()
        with captures() as made:
            capture = StepCapture(model, dynamic=True, both_modes=both, whole=both, one_mode=both)
            for training in (True, False, True):
                model.train(training)
                found.append(capture.capture((X,), {}, NO_TARGET, total))
        if not both or name in SHARED:
            assert len(made) == (1 if both else 2)
    for shared, own in zip(found[:3], found[3:], strict=True):
        assert all_of(shared) == all_of(own)
    assert found[0].ops is found[2].ops


@pytest.mark.parametrize("name", slow_in_turn([*BY_FLAG, "random draws", *BY_MODE], 3))
def test_the_graphs_of_the_table_are_those_of_their_mode(name: str) -> None:
    case, found = MODELS[name], list[Graph]()
    for both in (True, False):
        model = build(case)
        capture = StepCapture(model, dynamic=True, both_modes=both, whole=both, one_mode=both)
        for training in (True, False):
            model.train(training)
            args, kwargs = inputs(case, 7)
            found.append(capture.capture(args, kwargs, NO_TARGET, case.loss))
    for shared, own in zip(found[:2], found[2:], strict=True):
        assert all_of(shared)[1:] == all_of(own)[1:]  # the first line says the mode of the first capture


@pytest.mark.parametrize(
    "name", mostly_slow(MODELS, ("dropout", "attention dropout", "batch norm", "tied weight").__contains__, every=3)
)
def test_models_of_the_table(name: str) -> None:
    case = MODELS[name]
    if "own-gradients" in case.traits or case.reduce is not None:
        pytest.skip("its step takes another loss")
    step_case, deferred = stepped(case), "deferred_batch_norm" in case.options
    with captures() as made:
        model = build(case)
        pipe = fxpipe.compile(model, 2, CHUNKS, backward="code", schedule="1f1b", **case.options)

        def step(args: Any, kwargs: Any) -> Any:
            return pipe.step(*args, loss_fn=step_case.loss, outputs=True, **kwargs)

        for training in (True, False):
            pipe.train(training)
            twin = copy.deepcopy(model)
            twin.zero_grad()
            assert_same(one_step(step_case, model, 7, step), reference(step_case, twin, 7, CHUNKS))
            twin.zero_grad()
            model.zero_grad()
            args, kwargs = inputs(case, 7)
            torch.manual_seed(5)
            wanted = plain(case, twin, args, kwargs, CHUNKS, deferred=deferred)
            args, kwargs = inputs(case, 7)
            torch.manual_seed(5)
            output = pipe(*args, **kwargs)
            assert_same(finish(case, model, args, kwargs, output), wanted, case.tol)
            if training or name in BY_FLAG:
                assert len(made) == (2 if name in ALONE else 1)
        pipe.close()


@pytest.mark.parametrize("order", ORDERS)
def test_numbers_of_random_ops(order: str) -> None:
    """They count what draws in this mode, as in the plain model."""
    case = Case(InPlace, sequences, frozenset(), random=True)
    model, twin = build(case), build(case)
    with captures() as made:
        pipe = fxpipe.compile(model, devices=2, chunks=CHUNKS, backward="code")
        for training in ORDERS[order]:
            pipe.train(training)
            found = one_step(case, model, 7, lambda args, kwargs: pipe.step(*args, loss_fn=case.loss, outputs=True))
            twin.zero_grad()
            assert_same(found, reference(case, twin.train(training), 7, CHUNKS))
            assert all(stage.backward is not None for stage in pipe.build.program.stages)
    assert len(made) == 1
    pipe.close()


TRAINED = [name for name in SHARED if name != "every"]  # which cannot be trained


@pytest.mark.parametrize(
    ("name", "order"),
    mostly_slow(product(TRAINED, ORDERS), lambda one: TRAINED.index(one[0]) % 2 == [*ORDERS].index(one[1])),
)
def test_one_capture_for_steps_and_calls(name: str, order: str) -> None:
    """Each mode of a step has a build, and calls have one for both; random numbers are those of autograd."""
    model = SHARED[name]()
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    found: list[Any] = []
    with captures() as made, mock.patch.object(build_cache, "build", wraps=build_cache.build) as built:
        pipe = fxpipe.compile(model, devices=2, chunks=CHUNKS, backward="code", schedule="1f1b")
        for training in (*ORDERS[order], *ORDERS[order]):
            torch.manual_seed(3)
            pipe.zero_grad()
            found.append((pipe.train(training).step(X, loss_fn=total), [p.grad for p in model.parameters()]))
            graph = pipe.build.graph
            assert graph.training is training
            assert "train or eval" not in str(graph)
            assert all(stage.backward is not None for stage in pipe.build.program.stages)
            if not training:
                twin.zero_grad()
                wanted = total(twin.eval()(X))
                wanted.backward()  # type: ignore[no-untyped-call]
                torch.testing.assert_close(found[-1], (wanted.detach(), [p.grad for p in twin.parameters()]))
        assert built.call_count == 2
        for training in ORDERS[order]:
            check(model, twin, pipe, training, same_numbers=name == "no dropout")
        assert "train or eval" in str(pipe.build.graph)
        assert (len(made), built.call_count) == (1, 3)
        pipe.close()
    pipe = fxpipe.compile(other, devices=2, chunks=CHUNKS)
    for training, result in zip((*ORDERS[order], *ORDERS[order]), found, strict=True):
        torch.manual_seed(3)
        pipe.zero_grad()
        same = pipe.train(training).step(X, loss_fn=total), [p.grad for p in other.parameters()]
        torch.testing.assert_close(same, result)
    pipe.close()


class Recurrent(nn.Module):
    """Has a backward that depends on the length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.drop = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True), nn.Dropout(0.5)
        self.out = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.drop(self.lstm(self.embed(ids))[0]))


def test_lengths_that_are_numbers() -> None:
    """Backward wants numbers for lengths: the step is captured once more, and then serves both modes at this length."""
    model, ids = Recurrent(), torch.arange(30).reshape(6, 5) % 11
    with captures() as made:
        pipe = fxpipe.compile(model, devices=2, chunks=CHUNKS, backward="code")
        model.lstm.eval()  # in either mode: an LSTM takes the flag as a number
        pipe.step(ids, loss_fn=total)
        assert len(made) == 2
        pipe.eval()
        for given in (ids, ids.flip(1)):
            pipe.zero_grad()
            loss = pipe.step(given, loss_fn=total)
            twin = copy.deepcopy(model)
            twin.zero_grad()
            wanted = total(twin(given))
            wanted.backward()  # type: ignore[no-untyped-call]
            torch.testing.assert_close(loss, wanted.detach())
            for one, same in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one.grad, same.grad)
        assert len(made) == 2
        pipe.close()


@pytest.mark.parametrize("backward", ["autograd", "code"])
def test_dropout_in_evaluation_only(backward: str) -> None:
    """It has a seed of its own, so that a recomputation draws the same again."""
    model = Later().eval()
    pipe = fxpipe.compile(model, devices=1, chunks=CHUNKS, backward=backward, checkpoint="always")
    for training in (False, True, False):
        pipe.train(training)
        pipe.zero_grad()
        y = pipe(X)
        assert pipe.build.graph.ops[-1].random is not training
        y.sum().backward()
        # The gradient of the bias counts what was not dropped out, each twice.
        kept = (y.detach() != 0).sum(dim=(0, 1)) * (1.0 if training else 2.0)
        torch.testing.assert_close(model.a.bias.grad, kept)
    pipe.close()


def test_a_package_of_a_step_is_for_its_mode(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    pipe = fxpipe.compile(model, devices=2, chunks=CHUNKS, backward="code")
    pipe.step(X, loss_fn=total)
    pipe.eval().step(X, loss_fn=total)
    pipe.save(tmp_path / "steps")
    pipe(X)
    pipe.save(tmp_path / "calls")
    pipe.close()
    loaded = fxpipe.load(tmp_path / "steps", model)
    torch.testing.assert_close(loaded.step(X, loss_fn=total), total(model(X)).detach())
    loaded.close()
    loaded = fxpipe.load(tmp_path / "calls", model)
    torch.testing.assert_close(loaded.eval()(X), model(X))
    assert not torch.allclose(loaded.train()(X), loaded.eval()(X))
    loaded.close()
