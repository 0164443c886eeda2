"""Exceptions while a pipe runs: type and traceback are the model's, and notes say where, and what to write."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpipe


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # submodules are kept whole on purpose
        yield


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("in backward")


class Whole(nn.Module):
    """Kept whole, for the function cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    @torch.compiler.disable
    def fails(self, x: Tensor) -> Tensor:
        return Fails.apply(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.fails(self.fc(x))


LINE = Fails.backward.__code__.co_firstlineno + 2
NOTE = f'stage 1, micro-batch {{}}, in backward, at test_notes.py:{LINE}  raise KeyError("in backward")'


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_backward_of_a_call(checkpoint: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Whole())
    with closing(fxpipe.compile(model, devices=2, chunks=2, checkpoint=checkpoint)) as pipe:
        with pytest.raises(KeyError) as caught:
            pipe(torch.rand(4, 2)).sum().backward()
        assert notes(caught.value) == [NOTE.format(1)]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_backward_of_a_step(schedule: str, checkpoint: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Whole())
    with closing(fxpipe.compile(model, devices=2, chunks=2, schedule=schedule, checkpoint=checkpoint)) as pipe:
        with pytest.raises(KeyError) as caught:
            pipe.step(torch.rand(4, 2), loss_fn=torch.sum)
        first = 1 if schedule == "gpipe" else 0
        assert notes(caught.value) == [NOTE.format(first)]


def test_a_call_is_let_go_of() -> None:
    """What adds notes in backward holds nothing that holds autograd's graph."""
    with closing(fxpipe.compile(nn.Sequential(nn.Linear(2, 2), Whole()), 2, 2, checkpoint="never")) as pipe:
        pipe(torch.rand(4, 2))
        gc.collect()
        gc.disable()
        try:
            pipe(torch.rand(4, 2))
            left = [one for one in gc.get_objects() if type(one).__name__ == "FailsBackward"]
            assert left == []
        finally:
            gc.enable()


class Overwrites(nn.Module):
    """Backward fails in torch's own code, for autograd has kept what is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).exp()
        y.mul_(2)
        return y


def test_backward_without_a_line_of_the_users() -> None:
    line = Overwrites.forward.__code__.co_firstlineno + 1
    model = nn.Sequential(nn.Linear(2, 2), Overwrites())
    with closing(fxpipe.compile(model, 2, 2, cut=[1, 1], checkpoint="always")) as pipe:
        for run in (lambda x: pipe.step(x, loss_fn=torch.mean), lambda x: pipe(x).mean().backward()):
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                run(torch.rand(4, 2))
            assert notes(caught.value) == [
                f"stage 1, micro-batch 1, in backward of test_notes.py:{line}  1  y = self.fc(x).exp() ... "
                f"test_notes.py:{line + 1}  1  y.mul_(2)"
            ]


# BatchNorm with a single sample ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "chunks", "best"), [(8, 8, 4), (9, 6, 4), (3, 2, 1)])
def test_batch_norm_of_one_sample_names_chunks(batch: int, chunks: int, best: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    with closing(fxpipe.compile(model, devices=2, chunks=chunks)) as pipe:
        for run in (lambda x: pipe.step(x, loss_fn=torch.sum), pipe):
            with pytest.raises(ValueError, match="Expected more than 1 value per channel when training") as caught:
                run(torch.rand(batch, 3))
            where, advice = notes(caught.value)
            assert where.startswith("stage ")
            assert advice == (
                "BatchNorm in training needs two samples or more, and a micro-batch has one here: write "
                f"chunks={best} or less for a batch of {batch}"
            )
    with closing(fxpipe.compile(model, devices=2, chunks=best)) as pipe:
        pipe.step(torch.rand(batch, 3), loss_fn=torch.sum)


def test_batch_norm_of_one_sample_on_each_replica() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    with closing(fxpipe.compile(model, devices=3, chunks=4, replicas=(2, 1), cut=[2, 1])) as pipe:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training") as caught:
            pipe.step(torch.rand(8, 3), loss_fn=torch.sum)
        assert notes(caught.value)[1] == (
            "BatchNorm in training needs two samples or more, and a micro-batch has one on each of the 2 replicas of "
            "stage 0 here: write chunks=2 or less for a batch of 8"
        )
    with closing(fxpipe.compile(model, devices=3, chunks=2, replicas=(2, 1), cut=[2, 1])) as pipe:
        pipe.step(torch.rand(8, 3), loss_fn=torch.sum)


def test_a_batch_of_one_is_the_models_own_error() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with closing(fxpipe.compile(model, devices=1, chunks=2)) as pipe:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training") as caught:
            pipe(torch.rand(1, 3))
        assert len(notes(caught.value)) == 1
