"""Code of the user's can tell that a stage runs its forward again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe

SEEN: list[tuple[str, bool]] = []


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    SEEN.clear()
    yield
    assert not fxpipe.is_recomputing()


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        note("function")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@torch._dynamo.disable
def note(name: str) -> None:
    SEEN.append((name, fxpipe.is_recomputing()))


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        note("module")
        return Doubles.apply(self.inner(x))  # type: ignore[no-any-return]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), Kept(), nn.Linear(3, 3), nn.Linear(3, 3))


AGAIN = {"always": 4, "except_last": 3, "never": 0}  # of four micro-batches


@pytest.mark.filterwarnings("ignore:.*is kept whole:UserWarning")
@pytest.mark.parametrize("how", ["call", "step"])
@pytest.mark.parametrize("mode", AGAIN)
def test_forward_that_runs_again(mode: str, how: str) -> None:
    pipe = fxpipe.compile(model(), devices=2, chunks=4, checkpoint=mode)
    x = torch.randn(8, 3)

    def run() -> None:
        if how == "call":
            pipe(x).sum().backward()
        else:
            pipe.step(x, loss_fn=torch.sum)

    run()  # captures
    SEEN.clear()
    run()
    for name in ("module", "function"):
        assert SEEN.count((name, False)) == 4
        assert SEEN.count((name, True)) <= AGAIN[mode]
        # A step whose backward follows at once keeps what forward has made.
        assert how == "step" or SEEN.count((name, True)) == AGAIN[mode]
    assert mode == "never" or ("module", True) in SEEN
    pipe.close()


def test_it_is_false_elsewhere() -> None:
    """In the plain model, and in another thread than the one that recomputes."""
    from fxpipe.runtime.autograd.is_recomputing import recomputing

    found: list[bool] = []
    model()(torch.randn(2, 3))
    assert SEEN == [("module", False), ("function", False)]
    with recomputing():
        assert fxpipe.is_recomputing()
        thread = threading.Thread(target=lambda: found.append(fxpipe.is_recomputing()))
        thread.start()
        thread.join()
    assert found == [False]
