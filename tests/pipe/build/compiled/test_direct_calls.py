"""What Inductor has made is called directly for calls of a known kind, and for no other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fxpipe
from fxpipe.pipe.build.compiled import compiled_stages
from fxpipe.pipe.build.compiled.direct_calls import ANOTHER, Recorded, Run, known_call, recorded


def function(inputs: list[Any]) -> tuple[Tensor, ...]:
    """As Inductor's: sizes before tensors, and the list is emptied."""
    size, x, weight = inputs
    inputs.clear()
    return (x @ weight).view(size, -1), x + 1


def piece(x: Tensor, rows: int, weight: Tensor) -> tuple[Any, ...]:
    """As Dynamo's: guards, which are not shown, the function, and results put in place."""
    product, more = Recorded(function)([rows, x, weight])
    return product, [more, rows, None], x


def data(**options: Any) -> tuple[Tensor, int, Tensor]:
    return torch.randn(4, 3, **options), 4, torch.randn(3, 5, **options)


def known(args: tuple[Any, ...]) -> Callable[..., Any] | None:
    return known_call(args, *recorded(piece, args))


@torch.no_grad()
def test_calls_of_the_kind_are_the_pieces() -> None:
    call = known(data())
    assert call is not None
    for _ in range(2):
        args = data()
        found, (more, rows, none), x = call(*args)
        assert torch.equal(found, args[0] @ args[2])
        assert torch.equal(more, args[0] + 1)
        assert (rows, none, x) == (4, None, args[0])


class Functions(TorchFunctionMode):
    pass


class Ops(TorchDispatchMode):
    pass


OTHERS: dict[str, tuple[Callable[[Tensor, int, Tensor], tuple[Any, ...]], Callable[[], Any]]] = {
    "a size": (lambda x, rows, weight: (x[:3], rows, weight), nullcontext),
    "strides": (lambda x, rows, weight: (x.t().contiguous().t(), rows, weight), nullcontext),
    "a type": (lambda x, rows, weight: (x.double(), rows, weight), nullcontext),
    "a number": (lambda x, rows, weight: (x, 2, weight), nullcontext),
    "a number's type": (lambda x, rows, weight: (x, 4.0, weight), nullcontext),
    "no number": (lambda x, rows, weight: (x, x, weight), nullcontext),
    "no tensor": (lambda x, rows, weight: (None, rows, weight), nullcontext),
    "a tensor that needs a gradient": (lambda x, rows, weight: (x.requires_grad_(), rows, weight), nullcontext),
    "a parameter": (lambda x, rows, weight: (x, rows, nn.Parameter(weight, False)), nullcontext),
    "gradients": (lambda *args: args, torch.enable_grad),
    "autocast": (lambda *args: args, lambda: torch.autocast("cpu", torch.bfloat16)),
    "a function mode": (lambda *args: args, Functions),
    "a dispatch mode": (lambda *args: args, Ops),
    "no compiler": (lambda *args: args, lambda: torch.compiler.set_stance("force_eager")),
}


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_calls_of_another_kind_are_left_to_dynamo(name: str) -> None:
    change, context = OTHERS[name]
    call = known(data())
    assert call is not None
    args = change(*data())
    with context():
        assert call(*args) is ANOTHER


@torch.no_grad()
def test_one_tensor_for_two_arguments_is_another_kind() -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        made: Tensor = Recorded(lambda inputs: (inputs[0] + inputs[1],))([x, y])[0]
        return made

    x, y = torch.randn(2), torch.randn(2)
    call = known_call((x, y), *recorded(run, (x, y)))
    assert call is not None
    assert call(x, x) is ANOTHER
    assert known_call((x, x), *recorded(run, (x, x))) is None


@torch.no_grad()
def test_what_is_not_understood_is_left_to_dynamo() -> None:
    x, y = torch.randn(2), torch.randn(2)
    run = Run(function, (x,), (y,))
    assert known_call((x,), y, [run]) is not None
    assert known_call((x,), y, []) is None
    assert known_call((x,), y, [run, run]) is None
    assert known_call((x,), y.view(2), [run]) is None  # made behind the function
    assert known_call((x,), y, [Run(function, (torch.randn(2),), (y,))]) is None  # not an argument
    assert known_call((x, 0.5), y, [run]) is None
    with torch.enable_grad():
        assert known_call((x,), y, [run]) is None


class Net(nn.Module):
    """The last stage writes a buffer, which is left to Dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("most", torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).tanh())
        self.most.copy_(torch.maximum(self.most, y.detach().amax(0)))
        return y.relu()


@pytest.mark.slow
def test_steps_by_inductor_are_direct(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    runs: list[str] = []

    def counted(run: Callable[..., Any], args: Any) -> Any:
        runs.append("")
        return recorded(run, args)

    monkeypatch.setattr(compiled_stages, "recorded", counted)
    models, losses = [], []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Net().double()
        pipe = fxpipe.compile(model, 2, 4, schedule="1f1b", backward="code", cut=["second"], compile_stages=compiled)
        for rows in (16, 16, 12, 16, 12):
            x = torch.randn(rows, 6, dtype=torch.float64)
            seen = len(runs)
            losses.append(pipe.step(x, target=x, loss_fn=F.mse_loss))
        models.append(model)
        pipe.close()
    torch.testing.assert_close(losses[5:], losses[:5], rtol=1e-12, atol=1e-12)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(model.most for model in models))
    assert 0 < len(runs) - seen <= 4  # of 16 calls in the last step only those that write
