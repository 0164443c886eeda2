"""Loss functions whose code cannot be traced: kept whole in the last stage, and added up as `reduce` says."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError
from fxpipe.ir.graph.opaque_call import opaques
from tests.helpers.marks import mostly_slow

X, Y = torch.randn(8, 4, dtype=torch.double), torch.arange(8) % 3


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loss is kept whole on purpose
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def clipped(output: Tensor, target: Tensor, reduction: str = "mean", most: float = 2.0) -> Tensor:
    loss = F.cross_entropy(output, target, reduction=reduction)
    if float(loss.max()) > most * 1e6:
        loss = loss.clamp(max=most)
    return loss


def assert_steps_are_the_models(loss_fn: Callable[..., Tensor], reduce: str) -> None:
    model, twin = net(), net()
    with closing(fxpipe.compile(model, devices=2, chunks=4, reduce=reduce)) as pipe:
        for _ in range(2):
            loss = pipe.step(X, target=Y, loss_fn=loss_fn)
        assert len(pipe._state.cache.builds) == 1
    for _ in range(2):
        expected = loss_fn(twin(X), Y).sum()
        expected.backward()
    torch.testing.assert_close(loss.sum(), expected.detach())
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("reduce", mostly_slow(["mean", "sum", "none"], "mean".__eq__))
def test_a_function(reduce: str) -> None:
    loss_fn = partial(clipped, reduction=reduce)
    assert_steps_are_the_models(loss_fn, "auto" if reduce == "none" else reduce)


def test_functions_of_the_same_code_are_of_one_kind() -> None:
    """Made anew in every step, with other values each time."""
    model, twin = net(), net()
    with closing(fxpipe.compile(model, devices=2, chunks=4, reduce="mean")) as pipe:
        for scale in (1.0, 3.0, 0.5):
            loss_fn = lambda output, target: clipped(output, target) * scale  # noqa: B023, E731
            model.zero_grad()
            twin.zero_grad()
            loss = pipe.step(X, target=Y, loss_fn=loss_fn)
            expected = loss_fn(twin(X), Y)
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad)
        assert len(pipe._state.cache.builds) == 1
        assert [str(opaque) for opaque in opaques(pipe.build.graph)] == ["loss_fn"]
        assert "loss_fn" in pipe.stages[-1].source


def through(head: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    return clipped(head(output), target)


def test_modules_of_a_loss_have_gradients() -> None:
    model, twin, head = net(), net(), nn.Linear(3, 3).double()
    other = copy.deepcopy(head)
    with closing(fxpipe.compile(model, devices=2, chunks=4, reduce="mean")) as pipe:
        pipe.step(X, target=Y, loss_fn=partial(through, head))
    through(other, twin(X), Y).backward()
    pairs = zip((*model.parameters(), *head.parameters()), (*twin.parameters(), *other.parameters()), strict=True)
    for one, expected in pairs:
        torch.testing.assert_close(one.grad, expected.grad)


def test_says_to_write_reduce() -> None:
    line = clipped.__code__.co_firstlineno + 2
    with closing(fxpipe.compile(net(), devices=2, chunks=4)) as pipe:
        with pytest.raises(CaptureError) as caught:
            pipe.step(X, target=Y, loss_fn=partial(through, nn.Linear(3, 3).double()))
    assert re.sub(r"\(it .*?\)", "(...)", str(caught.value)) == (
        f"loss_fn is kept whole because of test_kept_loss.py:{line}  if float(loss.max()) > most * 1e6: (...), and\n"
        "the loss, f64[], is one value over the batch, and nothing tells whether it is a mean or a sum over its "
        "samples; write reduce={'loss': 'mean'} or reduce={'loss': 'sum'}; or, to have loss_fn traced, keep it a "
        "tensor: the operations take 0-dim tensors too"
    )


def test_one_micro_batch_needs_no_word() -> None:
    model, twin = net(), net()
    with closing(fxpipe.compile(model, devices=2, chunks=1)) as pipe:
        pipe.step(X, target=Y, loss_fn=clipped)
    clipped(twin(X), Y).backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_what_the_loss_raises_is_raised() -> None:
    def fails(output: Tensor, target: Tensor) -> Any:
        if float(output.sum()) < 1e9:
            raise KeyError("no such class")

    with closing(fxpipe.compile(net(), devices=2, chunks=4, reduce="mean")) as pipe:
        with pytest.raises(KeyError, match="no such class"):
            pipe.step(X, target=Y, loss_fn=fails)
