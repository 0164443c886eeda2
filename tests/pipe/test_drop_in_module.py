"""A pipe shows what its model is."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import fxpipe


def test_training_is_the_models() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    pipe, x = fxpipe.compile(model, devices=2, chunks=2), torch.randn(4, 3)
    assert pipe.training
    model.eval()
    assert not pipe.training
    torch.testing.assert_close(pipe(x), model(x))
    pipe.train()
    assert model.training
    assert model[1].training
    pipe.training = False
    assert not model.training


def test_a_loaded_package_follows_its_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).eval()
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    pipe(torch.randn(4, 3))
    pipe.save(tmp_path)
    loaded = fxpipe.load(tmp_path, model.train())
    assert not loaded.training
    assert not model.training


def test_it_prints_what_it_is_of() -> None:
    text = repr(fxpipe.compile(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), devices=1, chunks=2))
    assert text.startswith("Pipe(\n  of Sequential\n  (0): Linear(in_features=3")


class Noting(nn.Module):
    """A model with a child of the name `model`, which notes its dtype."""

    noted = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(x)
        return found

    def double(self) -> Noting:
        self.noted = torch.float64
        return super().double()


def test_methods_that_the_models_class_has_itself_are_the_models() -> None:
    model = Noting()
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    assert pipe.double() is pipe
    assert pipe.noted is model.noted is torch.float64
    x = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(pipe(x), model(x))


def test_paths_are_those_of_the_model() -> None:
    model = Noting()
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    assert pipe.get_submodule("model.0") is model.model[0]
    assert pipe.get_submodule("") is pipe
    assert pipe.get_parameter("model.0.weight") is model.model[0].weight
    pipe.set_submodule("model.1", nn.Linear(3, 5))
    assert pipe(torch.randn(4, 3)).shape == (4, 5)
