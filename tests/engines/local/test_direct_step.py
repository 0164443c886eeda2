"""Steps in which actions call the stages' code directly, beside observed ones, which take the general way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.engines.common.generated_backward import GeneratedBackward
from fxpipe.engines.local.thread_autotune import ThreadAutotune

CHUNKS = 4


class Block(nn.Module):
    """A layer with a weight that takes part in the sum of two others, so that its first gradient is another's too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) + self.bias)


class Turned(Block):
    """Gives a tensor that is not contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (2, 3)).transpose(1, 2)


class Back(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2).flatten(1))


class Skip(nn.Module):
    """The first layer's result skips two stages; the second gives a mask, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        second = self.b(first)
        mask = second > 0
        return self.d(self.c(second) * mask + first)


def straight() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)))


def turned() -> nn.Module:
    return nn.Sequential(Block(), Turned(), Back(), Block())


def frozen() -> nn.Module:
    """The first stage needs no gradients, and one weight of the third."""
    model = nn.Sequential(*(Block() for _ in range(4)))
    model[0].requires_grad_(False)
    model[2].inner.weight.requires_grad_(False)  # type: ignore[union-attr]
    return model


MODELS = {"straight": straight, "turned": turned, "frozen": frozen, "skip": Skip}


def step(pipe: fxpipe.Pipe, model: nn.Module, batch: tuple[Tensor, Tensor], **how: Any) -> list[Tensor | None]:
    """The loss and all gradients of a step, those of the input too."""
    model.zero_grad()
    x = batch[0].detach().requires_grad_(batch[0].requires_grad)
    loss = pipe.step(x, target=batch[1], loss_fn=F.mse_loss, **how)
    return [loss, x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("name", "replicas"), [("straight", 1), ("turned", 1), ("frozen", 1), ("skip", 1), ("straight", 2), ("skip", 2)]
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_both_ways_compute_the_same(name: str, replicas: int, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    general: list[str] = []
    for method in ("forward", "backward", "input_gradient", "weight_gradient"):
        monkeypatch.setattr(GeneratedBackward, method, counted(method, general))
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = copy.deepcopy(model)
    cut = ["1", "2", "3"] if name != "skip" else ["b", "c", "d"]
    pipe = fxpipe.compile(
        model, 4 * replicas, CHUNKS, replicas=[replicas] * 4, cut=cut, schedule=schedule, checkpoint="never"
    )
    for samples, wanted in ((2, False), (3, True), (1, False)):  # of each micro-batch and replica
        rows = samples * CHUNKS * replicas
        batch = torch.randn(rows, 6, requires_grad=wanted), torch.randn(rows, 6)
        step(pipe, model, batch)
        observed = step(pipe, model, batch, timeline=True)
        assert general
        plain.zero_grad()
        F.mse_loss(plain(batch[0]), batch[1]).backward()
        for alone in (False, True):
            monkeypatch.setattr(ThreadAutotune, "choose", lambda pace, alone=alone: alone)
            general.clear()
            direct = step(pipe, model, batch)
            if name == "straight" and samples == 2:
                assert not general  # one sample has the strides of any tensor, so each is looked at
            for one, other in zip(direct, observed, strict=True):
                assert (one is None) == (other is None)
                assert one is None or torch.equal(one, other)
            for one, parameter in zip(direct[2:], plain.parameters(), strict=True):
                torch.testing.assert_close(one, parameter.grad)
    pipe.close()


def counted(method: str, calls: list[str]) -> Any:
    own = getattr(GeneratedBackward, method)

    def run(self: GeneratedBackward, *args: Any) -> Any:
        calls.append(method)
        return own(self, *args)

    return run
