"""numpy's functions of plain numbers are numbers; all else of numpy is refused, or kept whole, as before."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import capture
from fxpipe.ir.graph.opaque_call import opaques

WIDTH = 4


class Scaled(nn.Module):
    """Numbers from a square root, a product over sizes, a least common multiple, one of which decides the way."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.lengths = [2, 3]

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x) * np.sqrt(x.shape[-1]) + float(np.prod(x.shape[1:]))
        if x.shape[-1] % np.lcm.reduce(self.lengths) != 0:
            x = torch.tanh(x) / np.log(np.lcm(2, 4))
        return x


class Drawn(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * np.random.rand()


class Typed(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).double() * torch.tensor(np.sqrt(2.0))


class Given(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).double() * torch.tensor(np.sqrt(2.0), dtype=torch.float64)


class Kept(Scaled):
    """A number of numpy's that the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1 / np.sqrt(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) * self.scale
        return y


def whole(inner: nn.Module) -> list[str]:
    """What is kept whole of a model with this module in it, whose results are those of the pipeline, too."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner)
    x = torch.randn(4, WIDTH)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is kept whole")
        pipe = fxpipe.compile(model, devices=["cpu"] * 2, chunks=2)
        np.random.seed(0)
        output = pipe(x)
        kept = [opaque.path for opaque in opaques(next(iter(pipe._state.cache.builds.values())).graph)]
    np.random.seed(0)
    wanted = torch.cat([model(part) for part in x.chunk(2)])
    assert output.dtype == wanted.dtype
    torch.testing.assert_close(output, wanted)
    output.sum().backward()
    found = [p.grad for p in model.parameters()]
    for got, want in zip(found, torch.autograd.grad(wanted.sum(), list(model.parameters())), strict=True):
        torch.testing.assert_close(got, want)
    return kept


@pytest.mark.parametrize("kind", [Scaled, Given, Kept])
def test_what_numpy_makes_of_plain_numbers_is_a_number(kind: type[Scaled]) -> None:
    assert whole(kind()) == []


@pytest.mark.parametrize("kind", [Drawn, Typed])
def test_random_numbers_and_types_stay_those_of_numpy(kind: type[Scaled]) -> None:
    assert whole(kind()) == ["1"]


def test_a_number_of_numpys_has_the_name_that_the_module_gives_it() -> None:
    assert [state.name for state in capture(Kept(), (torch.ones(2, WIDTH),)).states] == [
        "fc_weight",
        "fc_bias",
        "scale",
    ]
