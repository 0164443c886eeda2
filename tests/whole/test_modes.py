"""Modes of torch's around calls and steps: the default device is fine, those that change or watch ops are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import fxpipe

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


class Double(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.tanh, Tensor.tanh) else out


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x) + torch.arange(6))
        return self.b(x + torch.ones(6))


MODES = pytest.mark.parametrize(
    "mode", [Double, Watch, lambda: FlopCounterMode(display=False)], ids=["function", "dispatch", "flops"]
)
REFUSED = r"(Double|Watch|FlopCounterMode) is active here, a Torch"


@pytest.fixture
def pipe() -> Iterator[fxpipe.Pipe]:
    torch.manual_seed(0)
    made = fxpipe.compile(Positions(), devices=2, chunks=2, schedule="1f1b")
    yield made
    made.close()


@pytest.mark.parametrize("warm", [False, True])
@MODES
def test_a_mode_is_refused_by_name(pipe: fxpipe.Pipe, mode: Callable[[], Any], warm: bool) -> None:
    def step() -> None:
        pipe.step(X, target=X, loss_fn=F.mse_loss)

    if warm:
        pipe(X), step()
    for run in (lambda: pipe(X), step):
        with pytest.raises(fxpipe.FxpipeError, match=REFUSED), mode():
            run()
    torch.testing.assert_close(pipe(X), pipe.model(X))
    step()


@pytest.mark.parametrize("warm", [False, True])
def test_the_default_device(pipe: fxpipe.Pipe, warm: bool) -> None:
    expected = pipe.model(X)
    if warm:
        torch.testing.assert_close(pipe(X), expected)
    with torch.device("cpu"):
        torch.testing.assert_close(pipe(X), expected)
    torch.set_default_device("cpu")
    try:
        torch.testing.assert_close(pipe(X), expected)
        pipe.step(X, target=X, loss_fn=F.mse_loss)
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(pipe(X), expected)


@MODES
def test_a_loaded_package_refuses_it(pipe: fxpipe.Pipe, mode: Callable[[], Any], tmp_path: Path) -> None:
    def step(run: Any) -> Tensor:
        found: Tensor = run.step(X, target=X, loss_fn=F.mse_loss)
        return found

    pipe(X)
    pipe.save(tmp_path / "call")
    expected = step(pipe)
    pipe.save(tmp_path / "step")
    calls, steps = fxpipe.load(tmp_path / "call", pipe.model), fxpipe.load(tmp_path / "step", pipe.model)
    try:
        for _ in range(2):  # the second time, the packages have run
            for run in (lambda: calls(X), lambda: step(steps)):
                with pytest.raises(fxpipe.FxpipeError, match=REFUSED), mode():
                    run()
            torch.testing.assert_close(calls(X), pipe.model(X))
            torch.testing.assert_close(step(steps), expected)
        with torch.device("cpu"):
            torch.testing.assert_close(calls(X), pipe.model(X))
            torch.testing.assert_close(step(steps), expected)
    finally:
        calls.close(), steps.close()


@pytest.fixture
def compiled() -> Iterator[tuple[nn.Module, Any]]:
    """A model, and it compiled with torch.compile as a pipeline."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    yield model, torch.compile(model, backend="fxpipe", options={"devices": 2, "chunks": 2})
    torch._dynamo.reset()


@pytest.mark.parametrize("warm", [False, True])
def test_torch_compile_refuses_it(compiled: tuple[nn.Module, Any], warm: bool) -> None:
    model, run = compiled
    if warm:
        torch.testing.assert_close(run(X), model(X))
    with pytest.raises(fxpipe.FxpipeError, match=rf"{REFUSED}.*call the model in it without torch.compile"), Double():
        run(X)
    for _ in range(2):
        torch.testing.assert_close(run(X), model(X))
    with torch.device("cpu"):
        torch.testing.assert_close(run(X), model(X))


@pytest.mark.parametrize("warm", [False, True])
def test_torch_compile_in_a_dispatch_mode(compiled: tuple[nn.Module, Any], warm: bool) -> None:
    """torch itself runs the model as it is, so that the mode sees all of it."""
    model, run = compiled
    if warm:
        run(X)
    with FlopCounterMode(display=False) as plain:
        expected = model(X)
    with FlopCounterMode(display=False) as found:
        torch.testing.assert_close(run(X), expected)
    assert found.get_total_flops() == plain.get_total_flops() > 0
    torch.testing.assert_close(run(X), expected)
