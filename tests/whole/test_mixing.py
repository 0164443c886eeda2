"""Models that mix the samples of a batch: each micro-batch is one of its own, as in the plain model's loop, and one
warning says so, with the line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe import MixedSamplesWarning, PlanError
from fxpipe.errors import CaptureError
from tests.helpers.models import Case, vectors
from tests.helpers.transparency import assert_same, build, inputs, plain, step

CHUNKS = 4


class Contrast(nn.Module):
    """Two towers; their logits are of every sample with every other, and a layer is behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(8, 6), nn.Linear(8, 6), nn.Parameter(torch.tensor(0.5))
        self.last = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        image = F.normalize(self.image(x), dim=-1)
        text = F.normalize(self.text(x.sin()), dim=-1)
        logits = text @ image.t() * self.scale.exp() * self.last
        return {"text": logits, "image": logits.t(), "features": image}


class Centred(nn.Module):
    """Takes the mean over the batch from each sample, between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h - h.mean(0)
        return self.second(h)


class Experts(nn.Module):
    """Sorts the tokens of all samples by their expert, and puts them back."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(8, 3), nn.Linear(8, 2)
        self.experts = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 8)
        expert, order = torch.sort(self.router(tokens).argmax(-1))
        mixed = torch.bmm(tokens[order].unsqueeze(1), self.experts[expert]).squeeze(1)
        mixed = torch.zeros_like(mixed).index_copy(0, order, mixed)
        return self.head(torch.tanh(mixed).reshape(x.shape))


def total(output: Any) -> Tensor:
    values = output.values() if isinstance(output, dict) else [output]
    return sum((value.square().sum() for value in values), torch.tensor(0.0))


def sequences(batch: int) -> Any:
    return (torch.randn(batch, 3, 8, dtype=torch.float64),), {}


LINES = {"pairs": r"logits = text @", "centred": r"h = h - h.mean\(0\)", "sorted": r"torch.sort\("}
CASES = {
    "pairs": Case(Contrast, vectors, frozenset(), total),
    "centred": Case(Centred, vectors, frozenset(), total),
    "sorted": Case(Experts, sequences, frozenset(), total),
}


def own(name: str) -> Any:
    """Expect the warning that names the model's line."""
    return pytest.warns(MixedSamplesWarning, match=rf"(?s)test_mixing.py:\d+\n    .*{LINES[name]}.*micro-batch")


def through_torch(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    options |= {"devices": 2, "chunks": CHUNKS, "reduce": "cat"}  # else it does not cut what mixes samples
    return torch.compile(model, backend=fxpipe.backend.backend, dynamic=True, options=options)


def through_fxpipe(model: nn.Module, **options: Any) -> fxpipe.Pipe:
    return fxpipe.compile(model, 2, CHUNKS, **options)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("compiled", [through_fxpipe, through_torch])
def test_a_call_is_the_plain_models_on_each_micro_batch(name: str, compiled: Callable[..., Any]) -> None:
    case, sizes = CASES[name], (8, 8) if name == "pairs" else (8, 7)
    model, twin = build(case), build(case)
    pipe = compiled(twin, checkpoint="always")
    with own(name) if isinstance(pipe, fxpipe.Pipe) else nullcontext([]) as told:
        for batch in sizes:
            expected = plain(case, model, *inputs(case, batch), CHUNKS)
            assert_same(step(case, twin, pipe, *inputs(case, batch)), expected)
    mixed = [one for one in told if one.category is MixedSamplesWarning]
    assert len(mixed) == isinstance(pipe, fxpipe.Pipe)


@pytest.mark.parametrize(("name", "schedule"), [("centred", "1f1b"), ("sorted", "zb-h1")])
def test_a_step_is_the_plain_models_on_each_micro_batch(name: str, schedule: str) -> None:
    case = CASES[name]
    model, twin = build(case), build(case)
    pipe = fxpipe.compile(twin, 2, CHUNKS, schedule=schedule, checkpoint="always")
    with own(name) as told:
        for batch in (8, 7):
            expected = plain(case, model, *inputs(case, batch), CHUNKS)
            (x,), _ = inputs(case, batch)
            twin.zero_grad()
            loss, output = pipe.step(x, loss_fn=case.loss, outputs=True)
            torch.testing.assert_close((loss, output), (total(expected.output).detach(), expected.output.detach()))
            for key, parameter in twin.named_parameters():
                torch.testing.assert_close(parameter.grad, expected.gradients[key])
    assert len(told) == 1
    pipe.close()


def test_the_warning_says_what_becomes_of_the_outputs_and_what_to_write() -> None:
    pipe = fxpipe.compile(Contrast(), 2, CHUNKS)
    with own("pairs") as told:
        assert pipe(torch.randn(8, 8))["text"].shape == (8, 2)
    message = str(told[0].message)
    for part in (r"2 of 8", "joined: [8, 8] becomes [8, 2]", "chunks=1", "reduce={'logits': 'cat', ", "reduce='cat'"):
        assert part in message
    assert "mixes samples, each micro-batch by itself: test_mixing.py:" in pipe.explain()
    pipe.close()


@pytest.mark.parametrize("reduce", ["cat", {"logits": "cat", "t_1": "cat"}])
def test_nothing_is_said_where_the_user_said_it(reduce: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", MixedSamplesWarning)
        pipe = fxpipe.compile(Contrast(), 2, CHUNKS, reduce=reduce)
        assert pipe(torch.randn(8, 8))["image"].shape == (8, 2)
    assert "mixes samples" in pipe.explain()
    pipe.close()


def contrast(output: dict[str, Tensor]) -> Tensor:
    labels = torch.arange(output["text"].shape[0])
    return (F.cross_entropy(output["text"], labels) + F.cross_entropy(output["image"], labels)) / 2


def test_one_micro_batch_is_the_whole_batch() -> None:
    model, x = Contrast(), torch.randn(8, 8)
    pipe = fxpipe.compile(model, 2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MixedSamplesWarning)
        torch.testing.assert_close(pipe(x), model(x))
        torch.testing.assert_close(pipe.step(x, loss_fn=contrast), contrast(model(x)).detach())
    assert "mixes samples" not in pipe.explain()
    pipe.close()


def test_a_loss_of_pairs_is_named() -> None:
    pipe = fxpipe.compile(Contrast(), 2, CHUNKS)
    with pytest.raises(CaptureError, match=r"(?s)made of pairs of samples.*write reduce={'loss': 'mean'}"):
        pipe.step(torch.randn(8, 8), loss_fn=contrast)
    pipe = fxpipe.compile(Contrast(), 2, CHUNKS, reduce={"loss": "mean"})
    x = torch.randn(8, 8)
    expected = torch.stack([contrast(pipe.model(part)).detach() for part in x.split(2)]).mean()
    torch.testing.assert_close(pipe.step(x, loss_fn=contrast), expected)


def test_pairs_of_unequal_micro_batches_cannot_be_joined() -> None:
    pipe = fxpipe.compile(Contrast(), 2, CHUNKS)
    with pytest.raises(CaptureError, match=r"cannot be joined from micro-batches of the sizes 2, 2, 2, 1.*drop_last"):
        pipe(torch.randn(7, 8))


def test_replicas_do_not_mix_samples() -> None:
    pipe = fxpipe.compile(Centred(), 3, CHUNKS, replicas=(2, 1))
    with own("centred"), pytest.raises(PlanError, match=r"h.mean\(0\)\n.*leave out replicas"):
        pipe.step(torch.randn(8, 8), loss_fn=total)
