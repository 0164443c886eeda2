"""Rows that a mask selects, and the numbers of samples: right in every number of micro-batches, or said to be mixed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError, InputError, MixedSamplesWarning
from tests.helpers.layer_behind import LayerBehind
from tests.helpers.marks import mostly_slow

Body = Callable[[Any, Tensor, Tensor, Tensor], Any]
SELECTS: list[Body] = []
MIXES: list[Body] = []
REFUSED: dict[Body, str] = {}


class Selecting(nn.Module):
    """Two layers and what `body` makes of their result `h`, f64[b, 5, 8]; x is like h, and y i64[b, 5], -2 to 7."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)  # some rows are selected, and some are not
        self.inner, self.outer, self.table = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(8, 8)
        self.body = body
        self.register_buffer("keep", torch.tensor([True, False, True, True, False]))
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.body(self, self.outer(torch.relu(self.inner(x))), x, y)


def batch(samples: int = 6) -> tuple[Tensor, Tensor]:
    """A batch in which the first sample is selected whole by y > 0, and the last not at all."""
    random = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 5, 8, dtype=torch.float64, generator=random)
    y = torch.randint(-2, 8, (samples, 5), generator=random)
    y[0], y[-1] = torch.arange(1, 6), -1
    return x, y


def selects(body: Body) -> Body:
    SELECTS.append(body)
    return body


def mixes(body: Body) -> Body:
    MIXES.append(body)
    return body


def refused(said: str) -> Callable[[Body], Body]:
    def add(body: Body) -> Body:
        REFUSED[body] = said
        return body

    return add


# Losses and sums over rows --------------------------------------------------------------------------------------------


@selects
def labels(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    mask = y >= 0
    return F.cross_entropy(h[mask], y[mask])


@selects
def masks_alike(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(h[y >= 0], y[y >= 0], label_smoothing=0.1)


@selects
def flat(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    mask = (y >= 0).view(-1)
    return F.cross_entropy(h.view(-1, 8)[mask], y.view(-1)[mask], weight=torch.arange(1.0, 9.0, dtype=torch.float64))


@selects
def mean(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h[y > 0].mean()


@selects
def mean_of_each_feature(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h[y > 0].mean(0) * 2


@selects
def sum_over_count(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h[y > 0].sum() / (y > 0).sum()


@selects
def sum_over_rows(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    chosen = h[y > 0]
    return chosen.square().sum() / chosen.shape[0] + chosen.sum() / chosen.numel()


@selects
def squares(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    mask = y > 1
    return F.mse_loss(h[mask], x[mask]) + 0.1 * h.square().mean() + self.inner.weight.square().sum()


@selects
def elements(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    mask = x > 0.3
    return F.smooth_l1_loss(h[mask], x[mask])


@selects
def truths(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    return F.binary_cross_entropy_with_logits(h[mask], (x[mask] > 0).double())


@selects
def divergence(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    return F.kl_div(h[mask].log_softmax(-1), x[mask].softmax(-1), reduction="batchmean")


@selects
def by_element(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h.masked_select((y > 0).unsqueeze(-1)).sum()


@selects
def of_what_the_model_says(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h[h.sum(-1) > 0].sum()


@selects
def twice(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    return h[mask][y[mask] > 3].mean() + h[mask].view(-1, 2, 4).softmax(-1).square().sum()


@selects
def along_another_dimension(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h[:, self.keep].mean() + h.transpose(0, 1)[(y > 0).t()].sum()


@selects
def sequences(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    mask = y > 0
    scores = h.repeat(1, 3, 1).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, y.masked_select(mask), torch.full((len(x),), 15), mask.sum(-1))


@selects
def padded_sequences(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    scores = h.repeat(1, 3, 1).log_softmax(-1).transpose(0, 1)
    lengths = torch.div((y > -3).sum(-1) * 7, 2, rounding_mode="floor") - 2
    return F.ctc_loss(scores, y.abs(), lengths, (y > 0).sum(-1), reduction="sum")


# Rows that go back, or out --------------------------------------------------------------------------------------------


@selects
def put_back(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[y > 0] = self.table(y[y > 0]) * h[y > 0]
    return out


@selects
def scattered(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return x.masked_scatter((y > 0).unsqueeze(-1).expand_as(h), h[y > 0])


@selects
def returned(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h[y > 0]


@selects
def how_many(self: Any, h: Tensor, x: Tensor, y: Tensor) -> int:
    return h[y > 0].shape[0]


@selects
def by_places(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    i, j = torch.where(y > 0)
    return (self.table(j) * h[i, j]).sum()


@selects
def put_at_places(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    i, j = torch.where(y > 0)
    return torch.zeros_like(h).index_put((i, j), h[i, j].tanh())


@selects
def doubled(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    h[h > 0.5] *= 2
    return h


@selects
def by_listed_places(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    places, whole = (y > 0).nonzero(), (y.sum(-1) > 3).nonzero().squeeze(-1)
    return h[places[:, 0], places[:, 1]].sum() + h[whole].sum()


@selects
def experts(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rows, chosen = h.view(-1, 8), x.view(-1, 8).argmax(-1)
    out = torch.zeros_like(rows)
    for expert in range(3):
        at = torch.where(chosen == expert)[0]
        out = out.index_add(0, at, rows[at] @ self.outer.weight * (expert + 1))
        here = (chosen == expert + 3).nonzero().squeeze(1)
        out[here] = rows[here].tanh()
    return out.view(h.shape)


# Numbers of samples ---------------------------------------------------------------------------------------------------


@selects
def last_of_each(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h[torch.arange(len(h)), y.clamp(0, 4).argmax(-1)]


@selects
def in_flat_rows(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h.view(-1, 8)[torch.arange(len(h))[:, None] * 5 + y.clamp(0, 4)]


@selects
def sum_of_numbers(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    i, j = torch.where(y > 0)
    return (i * j).sum() * h.mean()


@mixes
def next_sample(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h[(torch.arange(len(h)) + 1) % len(h)]


@mixes
def first_samples(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h[torch.arange(len(h)) < 2].sum()


@mixes
def other_rows(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h.view(-1, 8)[torch.arange(len(h))]


@refused("it is made of the numbers of the samples, which each micro-batch counts from 0")
def weighted_by_numbers(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (h.sum((1, 2)) * torch.arange(len(h))).sum()


@refused("numbers the samples of the batch, and is returned")
def places(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (y > 0).nonzero()


# What pairs rows of different samples ---------------------------------------------------------------------------------


@mixes
def softmax_over_rows(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h[y > 0].softmax(0).square().sum()


@mixes
def two_masks(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (h[y > 0] * x[y.flip(1) > 0]).sum()


def more_than_there_are_places(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return x.masked_scatter((y > 0).unsqueeze(-1).expand_as(h), h)


@mixes
def of_no_sample(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h.masked_scatter((y > 0).unsqueeze(-1).expand_as(h), self.table.weight.repeat(4, 1))


@mixes
def in_the_order_of_places(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return x.masked_scatter((y > 0).unsqueeze(-1).expand_as(h), h.transpose(0, 1).flatten(0, 1))


@mixes
def reshaped(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h.flatten().view(4, -1).cumsum(0).sum(1)


@mixes
def orders(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (torch.cat([h, h]) * h.repeat_interleave(2, 0)).sum()


@refused("a mean over rows that data selects, of which samples have different numbers")
def mean_of_the_models_choice(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h[h.sum(-1) > 0].mean()


@refused("no sum or mean over its samples")
def root_of_a_mean(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    difference = h[x > 0] - x[x > 0]
    return (difference.square().mean() - 0.5 * difference.mean().square()).sqrt()


@refused("micro-batches cannot be joined")
def in_another_order(self: Any, h: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return h.transpose(0, 1)[(y > 0).t()]


# Checks ---------------------------------------------------------------------------------------------------------------


def named(body: Body) -> str:
    return body.__name__


def check(model: nn.Module, chunks: int, samples: int = 6, **options: Any) -> fxpipe.Pipe:
    """The pipe, after a call and its backward that were the plain model's."""
    plain = copy.deepcopy(model)
    pipe = fxpipe.compile(model, 2, chunks, **options)
    for _ in range(2):
        x, y = batch(samples)
        expected, found = plain(x, y), pipe(x, y)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        if isinstance(expected, Tensor) and expected.requires_grad:
            weight = torch.rand_like(expected)
            (expected * weight).sum().backward()
            (found * weight).sum().backward()
        same_gradients(model, plain)
    return pipe


def same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        ours, theirs = (torch.zeros_like(x) if x.grad is None else x.grad for x in (one, other))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("body", mostly_slow(SELECTS, SELECTS[::2].__contains__), ids=named)
def test_what_is_selected_is_the_models(body: Body) -> None:
    """In 3 uneven micro-batches, of which the last selects nothing; and in two stages, with nothing kept whole."""
    model = Selecting(body)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with closing(check(model, 3, 7)) as pipe:
            assert len(pipe.stages) == 2


@pytest.mark.parametrize("body", mostly_slow([*SELECTS, *MIXES, *REFUSED], [*MIXES, *REFUSED].__contains__), ids=named)
def test_uncut_it_is_the_models(body: Body) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(Selecting(body), 1).close()


@pytest.mark.parametrize("body", MIXES, ids=named)
def test_what_pairs_other_rows_is_mixed(body: Body) -> None:
    with (
        closing(fxpipe.compile(LayerBehind(Selecting(body)), 2, 3)) as pipe,
        pytest.warns(MixedSamplesWarning, match=r"test_selected_rows.py:\d+"),
    ):
        pipe(*batch())


def test_more_values_than_places_are_refused_in_the_run() -> None:
    """The values of one sample would go to another one in the whole batch."""
    with (
        closing(fxpipe.compile(Selecting(more_than_there_are_places), 2, 3)) as pipe,
        pytest.raises(
            InputError, match=r"a mask has .* places, and 80 values of a micro-batch's samples are put there"
        ),
    ):
        pipe(*batch())
    check(Selecting(more_than_there_are_places), 1).close()


@pytest.mark.parametrize("body", REFUSED, ids=named)
def test_what_no_micro_batch_can_tell_is_refused(body: Body) -> None:
    said = rf"(?s)(test_selected_rows|layer_behind).py:\d+\n.*{REFUSED[body]}"
    with closing(fxpipe.compile(LayerBehind(Selecting(body)), 2, 2)) as pipe, pytest.raises(CaptureError, match=said):
        pipe(*batch())


class WithLoss(nn.Module):
    """A loss of what is selected."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.model = nn.Linear(8, 8).double(), Selecting(body)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made: Tensor = self.model(self.first(x) + x, y)
        return made.square().sum() if made.dim() else made


STEPS = [labels, twice, put_back, experts, sequences]
WAYS: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "zb-h1", "checkpoint": "never"},
    {"schedule": "gpipe", "checkpoint": "always"},
    {"schedule": "1f1b", "backward": "code"},
    {"schedule": "zb-h1", "backward": "code", "checkpoint": "selective"},
]


@pytest.mark.parametrize("options", WAYS, ids=lambda options: "-".join(options.values()))
@pytest.mark.parametrize("body", mostly_slow(STEPS, [labels].__contains__), ids=named)
def test_steps_are_the_models(body: Body, options: dict[str, Any]) -> None:
    model = WithLoss(body)
    plain = copy.deepcopy(model)
    x, y = batch(7)
    with closing(fxpipe.compile(model, 2, 3, **options)) as pipe:
        for _ in range(2):
            expected = plain(x, y)
            expected.backward()
            torch.testing.assert_close(pipe.step(x, y), expected.detach(), rtol=1e-9, atol=1e-9)
            same_gradients(model, plain)


def test_stages_whose_sizes_data_decides_have_a_backward_as_code() -> None:
    with closing(fxpipe.compile(WithLoss(labels), 2, 3, backward="code")) as pipe:
        pipe.step(*batch())
        assert not any(stage.autograd_because for stage in pipe.build.program.stages)
