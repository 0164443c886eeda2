"""Bad input gets an error that shows the value and says what to write; the model stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.errors import CaptureError, FxpipeError, InputError, PackageError, PlanError
from tests.helpers.layer_behind import LayerBehind

X = torch.randn(6, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices is 0"),
        ({"devices": []}, r"devices is \[\]"),
        ({"devices": ["gpu7"]}, "'gpu7' in devices is not a device"),
        ({"chunks": 0}, "chunks is 0"),
        ({"checkpoint": "sometimes"}, "checkpoint is 'sometimes'"),
        ({"checkpoint": {5}}, r"the stages \[5\]"),
        ({"cut": ["encoder.1", "head"]}, "makes 3 stages, but there are 2 devices"),
        ({"schedule": "2f2b"}, r"schedule is '2f2b': write 'gpipe', '1f1b', .*; did you mean '1f1b'\?"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        fxpipe.compile(Net(), **{"devices": 2, "chunks": 2} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cut": [1, 1]}, r"adds up to 2"),
        ({"cut": ["encoder.9"]}, "'encoder.9', which is no module"),
        ({"devices": 40}, "40 stages"),
    ],
)
def test_plans_that_cannot_be(options: dict[str, Any], message: str) -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(PlanError, match=message):
        fxpipe.compile(model, **{"devices": 2, "chunks": 2, "example_inputs": (X,)} | options)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_plan_for_another_model() -> None:
    plan = fxpipe.compile(Net(), devices=2, chunks=2, example_inputs=(X,)).plan
    with pytest.raises(PlanError, match="the plan is for another model"):
        fxpipe.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), plan=plan, example_inputs=(X,))


def test_no_common_batch_size() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * mask

    with pytest.raises(InputError, match=r"(?s)x: 6.*mask: 4") as raised:
        fxpipe.compile(Two(), devices=1, chunks=2)(X, torch.ones(4))
    assert "batch_dim" in str(raised.value)
    pipe = fxpipe.compile(Two(), devices=1, chunks=2, batch_dim={"mask": None})
    assert torch.equal(pipe(X, torch.ones(4)), X)


class Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x**2).mean()


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x**2).max()


def test_a_model_that_cannot_be_cut() -> None:
    x = X.clone().requires_grad_()  # of data alone, what mixes samples is computed for the whole batch
    with pytest.raises(CaptureError, match="reduce") as raised:
        fxpipe.compile(LayerBehind(Largest(), X.dtype), devices=1, chunks=2)(x)
    assert "test_bad_input.py" in str(raised.value)
    assert "return (x**2).max()" in str(raised.value)


@pytest.mark.parametrize("reduce", ["auto", "mean"])
def test_a_mean_over_the_batch(reduce: str) -> None:
    pipe = fxpipe.compile(Loss(), devices=1, chunks=4, reduce=reduce)
    torch.testing.assert_close(pipe(X), (X**2).mean())


def test_a_package_for_another_model(tmp_path: Any) -> None:
    fxpipe.compile(Net(), devices=2, chunks=2, example_inputs=(X,)).save(tmp_path / "out")
    with pytest.raises(PackageError, match=r"head\.weight"):
        fxpipe.load(tmp_path / "out", nn.Sequential(nn.Linear(4, 4)))


class Returns(nn.Module):
    """What `what` makes of the model and x."""

    def __init__(self, what: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.what, self.w = what, nn.Parameter(torch.linspace(0, 1, 3))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: Tensor) -> Any:
        return self.what(self, x)


@pytest.mark.parametrize(
    "what",
    [
        lambda self, x: x,
        lambda self, x: self.w,
        lambda self, x: {"w": self.w, "x": x},
        lambda self, x: x.shape[0],
        lambda self, x: 3,
        lambda self, x: None,
    ],
)
def test_models_that_compute_nothing(what: Callable[[Any, Tensor], Any]) -> None:
    """A call returns what the model returns: there is nothing that could run on devices."""
    model = Returns(what)
    found, wanted = (pytree.tree_flatten(call(X)) for call in (fxpipe.compile(model, 2, 3), model))
    assert found[1] == wanted[1]
    assert all(mine is own for mine, own in zip(found[0], wanted[0], strict=True))
    with pytest.raises(FxpipeError, match=r"Returns has no ops: .*; call it itself"):
        fxpipe.compile(model, 2, 3, example_inputs=X)


@pytest.mark.parametrize(
    "what",
    [
        lambda self, x: self.w.sin() * 2,
        lambda self, x: (self.table + 1) * self.w,
        lambda self, x: (torch.ones(3) * 2 + self.table, self.w * 1),
    ],
)
def test_models_that_do_not_look_at_their_input(what: Callable[[Any, Tensor], Any]) -> None:
    model = Returns(what)
    twin = copy.deepcopy(model)
    pipe = fxpipe.compile(twin, 2, 3)
    found, expected = (pytree.tree_leaves(one(X)) for one in (pipe, model))
    torch.testing.assert_close(found, expected)
    found[-1].sum().backward()
    expected[-1].sum().backward()
    torch.testing.assert_close(twin.w.grad, model.w.grad)
    pipe.close()


def test_torch_compile_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = fxpipe.compile(Net(), 2, 3)
    with torch.compiler.set_stance("force_eager"), pytest.raises(CaptureError, match=r"torch\.compile is switched off"):
        pipe(X)
    torch.testing.assert_close(pipe(X), pipe.model(X))
    pipe.close()
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(CaptureError, match=r"torch\.compile is switched off"):
        fxpipe.compile(Net(), 2, 3)


def test_folders_are_not_overwritten(tmp_path: Any) -> None:
    pipe = fxpipe.compile(Net(), devices=2, chunks=2, example_inputs=(X,))
    pipe.save(tmp_path / "out")
    with pytest.raises(PackageError, match="overwrite=True"):
        pipe.save(tmp_path / "out")
    pipe.save(tmp_path / "out", overwrite=True)
