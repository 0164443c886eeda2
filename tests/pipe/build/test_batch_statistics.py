"""What users are told of batch norms: that they see micro-batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import BatchStatisticsWarning
from fxpipe.pipe.build import batch_statistics
from tests.whole.test_deferred_norms import Whole


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y


def net(*norms: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *norms, nn.Linear(4, 4))


@pytest.fixture
def compile() -> Iterator[Any]:
    made: list[fxpipe.Pipe] = []

    def compile(model: nn.Module, chunks: int = 4, **options: Any) -> fxpipe.Pipe:
        made.append(fxpipe.compile(model, ["cpu", "cpu"], chunks, **options))
        return made[-1]

    yield compile
    for pipe in made:
        pipe.close()


def told(pipe: fxpipe.Pipe, *xs: Tensor) -> list[str]:
    """What calls say of batch statistics."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in xs:
            pipe(x)
    return [str(one.message) for one in caught if one.category is BatchStatisticsWarning]


def test_a_warning_says_once_what_normalises_and_what_to_write(compile: Any) -> None:
    pipe = compile(net(nn.BatchNorm1d(4)))
    (text,) = told(pipe, torch.randn(10, 4), torch.randn(10, 4), torch.randn(9, 4).requires_grad_())
    assert text.startswith(
        "BatchNorm uses the statistics of micro-batches in 1: the mean and variance of 2 or 3 samples, not those of "
        "the batch of 10."
    )
    assert "running statistics are updated 4 times for the batch" in text
    assert "deferred_batch_norm=True makes the running statistics those of the whole batch; each micro-batch is" in text
    assert text.endswith("If this is meant, write deferred_batch_norm=False.")
    assert "batch statistics: in 1, each micro-batch is normalised by its own mean and variance; " in pipe.explain()
    assert "with those of each micro-batch, in turn (deferred_batch_norm=False)" in pipe.explain()


@pytest.mark.parametrize("said", [True, False])
def test_who_says_what_is_meant_is_not_told(compile: Any, said: bool) -> None:
    pipe = compile(net(nn.BatchNorm1d(4)), deferred_batch_norm=said)
    assert told(pipe, torch.randn(8, 4)) == []
    assert f"(deferred_batch_norm={said})" in pipe.explain()


@pytest.mark.filterwarnings("ignore:.*is kept whole")
def test_norms_inside_of_what_is_kept_whole_are_seen(compile: Any) -> None:
    pipe = compile(net(Whole(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 4), nn.BatchNorm1d(4))))
    (text,) = told(pipe, torch.randn(8, 4))
    assert "in 1.parts.0, 1.parts.2: the mean" in text


def test_many_norms_are_counted(compile: Any) -> None:
    (text,) = told(compile(net(*(nn.BatchNorm1d(4) for _ in range(4)))), torch.randn(8, 4))
    assert "in 4 norms (1, 2, 3, ...): the mean" in text


def test_also_those_without_running_statistics_in_evaluation(compile: Any) -> None:
    model = net(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    assert len(told(compile(model), torch.randn(8, 4))) == 1


def test_nothing_is_said_where_nothing_differs(compile: Any) -> None:
    for model, chunks in [(net(nn.BatchNorm1d(4)).eval(), 4), (net(nn.BatchNorm1d(4)), 1), (net(nn.LayerNorm(4)), 4)]:
        pipe = compile(model, chunks)
        assert told(pipe, torch.randn(8, 4)) == []
        assert "batch statistics" not in pipe.explain()


def test_a_step_says_it_too(compile: Any) -> None:
    x = torch.randn(8, 4)
    with pytest.warns(BatchStatisticsWarning):
        compile(net(nn.BatchNorm1d(4))).step(x, target=x, loss_fn=F.mse_loss)


def test_torch_compile_says_it_too() -> None:
    compiled = torch.compile(Images(), backend="fxpipe", dynamic=True, options={"devices": ["cpu", "cpu"], "chunks": 2})
    with pytest.warns(BatchStatisticsWarning, match="2 samples, not"):
        compiled(torch.randn(4, 3, 2, 2))
    torch._dynamo.reset()


class Counts(nn.Module):
    """Buffers that forward writes in place and anew, one of them through a view, beside those of a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last = nn.utils.parametrizations.spectral_norm(self.last)
        for name in ("seen", "calls", "kept"):
            self.register_buffer(name, torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        if self.training:
            self.seen[0] += h.detach().mean()
            self.calls = self.calls + 1
        y: Tensor = self.last(h) + self.calls.sum() + self.kept.sum()
        return y


def test_a_warning_names_other_buffers_that_forward_writes(compile: Any) -> None:
    pipe = compile(Counts(), deferred_batch_norm=True)
    (text,) = told(pipe, torch.randn(8, 4), torch.randn(8, 4))
    assert text.startswith("forward writes into 4 buffers (")
    assert "4 times for the batch" in text
    assert set(batch_statistics.written_buffers(pipe.build.graph)) == {
        "seen", "calls", *(f"last.parametrizations.weight.0._{name}" for name in "uv"),
    }  # fmt: skip
    assert "written buffers: each micro-batch writes into 4 buffers (" in pipe.explain()
    assert told(compile(Counts(), 1), torch.randn(8, 4)) == []
    assert told(compile(Counts().eval()), torch.randn(8, 4)) == []
    assert told(compile(net()), torch.randn(8, 4)) == []


class Tally(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * self.scale


@pytest.mark.filterwarnings("ignore:.*is kept whole")
def test_buffers_that_a_submodule_kept_whole_writes_are_named(compile: Any) -> None:
    pipe = compile(net(Whole(nn.BatchNorm1d(4), Tally(), nn.Linear(4, 4))), deferred_batch_norm=True)
    (text,) = told(pipe, torch.randn(8, 4), torch.randn(8, 4))
    assert text.startswith("forward writes into 1.parts.1.seen: each micro-batch does so in turn, 4 times")
    assert "written buffers: each micro-batch writes into 1.parts.1.seen, in turn" in pipe.explain()
