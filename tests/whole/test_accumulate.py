"""Gradient accumulation: several steps, one mean, as `(loss / n).backward()` in a plain loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import PlanError

SIZES = (8, 8, 5)  # the last batch is smaller, and its micro-batches are of two sizes
EACH = len(SIZES)


class OwnLoss(nn.Module):
    """A loss of its own, which ignores some labels."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.fc(x))), labels, ignore_index=0)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 6, dtype=torch.float64, generator=generator) for size in SIZES]


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for name, wanted in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, wanted.grad, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("loss_fn", [F.mse_loss, nn.MSELoss(reduction="sum"), nn.MSELoss(reduction="none")])
@pytest.mark.parametrize(
    "options",
    [
        {"devices": 2},
        {"devices": 3, "schedule": "zb-h1", "checkpoint": "always"},
        {"devices": 3, "replicas": (2, 1), "schedule": "1f1b"},
    ],
    ids=["gpipe", "zb-h1", "replicas"],
)
def test_gradients_are_those_of_the_mean(options: Any, loss_fn: Any) -> None:
    if getattr(loss_fn, "reduction", "") == "none":
        loss_fn = each_sample
    model = chain()
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, chunks=3, **options)
    for x in batches():
        wanted = loss_fn(plain(x), x.cos())
        (wanted.sum() / EACH).backward()
        loss = pipe.step(x, target=x.cos(), loss_fn=loss_fn, accumulate=EACH)
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=0)  # not divided
    assert_same_gradients(model, plain)
    pipe.close()


def each_sample(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean(1)


def test_a_loss_of_the_models_own() -> None:
    torch.manual_seed(0)
    model = OwnLoss().double()
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, 2, 3, schedule="1f1b")
    for x in batches():
        labels = torch.arange(len(x)) % 3
        (plain(x, labels) / EACH).backward()
        pipe.step(x, labels, accumulate=EACH)
    assert_same_gradients(model, plain)
    pipe.close()


def test_with_a_scaler_inputs_and_a_timeline() -> None:
    model = chain().float()
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, 2, 2, schedule="1f1b")
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    for x in batches():
        ours, theirs = x.float().requires_grad_(), x.float().requires_grad_()
        scaler.scale(F.mse_loss(plain(theirs), x.float()) / EACH).backward()
        pipe.step(ours, target=x.float(), loss_fn=F.mse_loss, scaler=scaler, accumulate=EACH, timeline=True)
        torch.testing.assert_close(ours.grad, theirs.grad)
    for name, wanted in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, wanted.grad)
    pipe.close()


def test_a_scale_is_divided_in_the_type_of_the_loss() -> None:
    """The scale is a float32, of which a third is none; the loss is a float64."""
    model = chain()
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, 2, 2, schedule="1f1b")
    scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    for x in batches():
        scaler.scale(F.mse_loss(plain(x), x.cos()) / EACH).backward()
        pipe.step(x, target=x.cos(), loss_fn=F.mse_loss, scaler=scaler, accumulate=EACH)
    for name, wanted in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, wanted.grad, rtol=1e-12, atol=1e-11)
    pipe.close()


def test_a_package_accumulates_too(tmp_path: Any) -> None:
    model = chain()
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, 2, 3)
    x = batches()[0]
    pipe.step(x, target=x, loss_fn=F.mse_loss)
    pipe.save(tmp_path)
    pipe.close()
    model.zero_grad()
    loaded = fxpipe.load(tmp_path, model)
    for _ in range(3):
        loaded.step(x, target=x, accumulate=3)
    F.mse_loss(plain(x), x).backward()
    assert_same_gradients(model, plain)
    loaded.close()


@pytest.mark.parametrize("count", [0, -1, 2.5, "two", None])
def test_what_is_no_count_is_refused(count: Any) -> None:
    model = chain()
    x = batches()[0]
    pipe = fxpipe.compile(model, 2, 2)
    with pytest.raises(PlanError, match=r"accumulate is .*as in accumulate=4"):
        pipe.step(x, target=x, loss_fn=F.mse_loss, accumulate=count)
    assert all(p.grad is None for p in model.parameters())
    pipe.close()
