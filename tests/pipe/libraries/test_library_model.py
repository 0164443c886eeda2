"""A pipe of a model that a library trains and saves is one of that library's models, to the library."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.pipe.pipe import Pipe


class Pretrained(nn.Module):
    """As a library has it: the models that it saves are its subclasses."""

    def save_pretrained(self, folder: str) -> str:
        return f"{type(self).__name__} in {folder}"

    @classmethod
    def from_pretrained(cls, folder: str) -> Any: ...


class Classifier(Pretrained):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.second(self.first(x).relu())


def test_it_is_an_instance_of_the_librarys_class() -> None:
    pipe = fxpipe.compile(Classifier(), devices=2, chunks=2)
    assert isinstance(pipe, Pretrained)
    assert isinstance(pipe, Pipe)
    assert type(pipe) is Pipe
    assert pipe.__class__.__name__ == "Classifier"
    assert list(inspect.signature(pipe.__class__.forward).parameters) == ["self", "x", "labels"]
    assert pipe.save_pretrained("here") == "Classifier in here"
    assert repr(pipe).startswith("Pipe(\n  of Classifier")


def test_it_runs_and_is_copied_as_any_pipe() -> None:
    model, x = Classifier(), torch.randn(4, 4)
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    torch.testing.assert_close(pipe(x), model(x))
    twin = copy.deepcopy(pipe)
    assert type(twin) is Pipe
    torch.testing.assert_close(twin(x), model(x))
    twin.close()
    pipe.close()


def test_the_class_of_another_models_pipe_is_its_own() -> None:
    pipe = fxpipe.compile(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), devices=2, chunks=2)
    assert pipe.__class__ is Pipe
    assert not isinstance(pipe, nn.Sequential)


def test_where_its_stages_are() -> None:
    pipe = fxpipe.compile(Classifier(), devices=2, chunks=2)
    assert pipe.hf_device_map == {"stage 0": "cpu:0", "stage 1": "cpu:1"}
