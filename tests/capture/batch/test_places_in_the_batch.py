"""What depends on a sample's place in the batch, which is another one in a micro-batch: never silently wrong.

Beside each op that makes something of places stands one that does not, and is right.
"""

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
from fxpipe.errors import CaptureError, MixedSamplesWarning
from tests.helpers.marks import mostly_slow

Body = Callable[["Placed", Tensor, Tensor], Tensor]


class Placed(nn.Module):
    """A layer on what `body` makes of h, f64[b, 5, 8], and the words x, i64[b, 5], of 10."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.table, self.out = nn.Embedding(10, 8), nn.Embedding(50, 8), nn.Linear(8, 8)
        self.body = body
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self, self.words(x), x))  # type: ignore[no-any-return]

    @property
    def rows(self) -> Tensor:
        return self.table.weight


def numbers(x: Tensor) -> Tensor:
    return torch.arange(len(x))


def of_one(h: Tensor, rows: Tensor) -> Tensor:
    """The rows of each sample, f64[b, ...], added to it."""
    return h + rows.reshape(len(h), -1, rows.shape[-1])


def written(mask: Tensor, index: Any) -> Tensor:
    mask = mask.clone()
    mask[index] = 1
    return mask


REFUSED: dict[str, Body] = {
    "a row of a table": lambda m, h, x: of_one(h, m.rows[numbers(x)]),
    "an element of a table": lambda m, h, x: h * m.rows[numbers(x), 0][:, None, None],
    "an embedding": lambda m, h, x: of_one(h, m.table(numbers(x))),
    "index_select": lambda m, h, x: of_one(h, m.rows.index_select(0, numbers(x))),
    "gather": lambda m, h, x: of_one(h, m.rows.gather(0, numbers(x)[:, None].expand(-1, 8))),
    "take_along_dim": lambda m, h, x: of_one(h, torch.take_along_dim(m.rows, numbers(x)[:, None], 0)),
    "the places of a mask": lambda m, h, x: h + m.rows[torch.where(x[:, 0] > -1)[0]][:, None],
    "the places of ones": lambda m, h, x: of_one(h, m.rows[torch.ones(len(x)).nonzero()[:, 0]]),
    "places of tokens": lambda m, h, x: of_one(h, m.rows[numbers(x).repeat_interleave(5)]),
    "one_hot": lambda m, h, x: of_one(h, F.one_hot(numbers(x), 50).to(h.dtype) @ m.rows),
    "scatter": lambda m, h, x: of_one(h, h.new_zeros(len(x), 8).scatter(1, (numbers(x) % 8)[:, None], 1.0)),
    "gather of its own": lambda m, h, x: h.gather(1, (numbers(x) % 5)[:, None, None].expand(-1, 5, 8)),
    "its own token": lambda m, h, x: of_one(h, h[numbers(x), numbers(x) % 5]),
    "compared": lambda m, h, x: h * (x == numbers(x)[:, None])[..., None],
    "where": lambda m, h, x: torch.where((numbers(x) < 1)[:, None, None], h, 2 * h),
    "a sum of ones before": lambda m, h, x: h + torch.ones(len(x)).cumsum(0)[:, None, None],
    "a triangle": lambda m, h, x: h + torch.ones(len(x), len(x)).tril().sum(1)[:, None, None],
    "a unit vector": lambda m, h, x: h + torch.eye(len(x))[0][:, None, None],
    "the first, written": lambda m, h, x: h + written(torch.zeros(len(x)), 0)[:, None, None],
    "the first of a slice, written": lambda m, h, x: h + written(torch.zeros(len(x)), slice(0, 1))[:, None, None],
    "its token, written": lambda m, h, x: h + written(torch.zeros(len(x), 5), (numbers(x), numbers(x) % 5))[..., None],
    "one before zeros": lambda m, h, x: h + torch.cat((torch.ones(1), torch.zeros(len(x) - 1)))[:, None, None],
    "the first rows of a table": lambda m, h, x: of_one(h, m.rows[: len(x)]),
    "narrow": lambda m, h, x: of_one(h, m.rows.narrow(0, 0, len(x))),
    "how many there are": lambda m, h, x: h + torch.full((len(x),), len(x))[:, None, None],
}
MIXES: dict[str, Body] = {
    "the first": lambda m, h, x: written(h, 0),
    "the last": lambda m, h, x: written(h, -1),
    "the first two": lambda m, h, x: written(h, slice(None, 2)),
    "each second": lambda m, h, x: written(h, slice(None, None, 2)),
    "behind an ellipsis": lambda m, h, x: written(h, (..., 0, slice(None), slice(None))),
    "select_scatter": lambda m, h, x: h.select_scatter(torch.zeros(5, 8, dtype=h.dtype), 0, 0),
    "slice_scatter": lambda m, h, x: torch.slice_scatter(h, torch.zeros(1, 5, 8, dtype=h.dtype), 0, 0, 1),
}
RIGHT: dict[str, Body] = {
    "a token of its own": lambda m, h, x: of_one(h, h[numbers(x), x[:, 0] % 5]),
    "places in each sample": lambda m, h, x: of_one(h, m.rows[torch.arange(x.numel()) % 5]),
    "an embedding of these": lambda m, h, x: of_one(h, m.table(torch.arange(x.numel()) % 5)),
    "expanded": lambda m, h, x: h + m.table(torch.arange(5).expand(len(x), 5)),
    "a sum of ones in each sample": lambda m, h, x: h + m.table(torch.ones_like(x).cumsum(1)),
    "a triangle of tokens": lambda m, h, x: torch.ones(len(x), 5, 5, dtype=h.dtype).tril() @ h,
    "a state that begins with zeros": lambda m, h, x: h + m.out(h.new_zeros(len(x), 5, 8)).tanh(),
    "padded": lambda m, h, x: h + F.pad(torch.zeros(len(x), 5, 7), (1, 0), value=1.0),
    "a table for all": lambda m, h, x: h + m.rows[:5].repeat(len(x), 1, 1),
    "a table behind another": lambda m, h, x: of_one(h, m.rows[:5].repeat(len(x), 1)),
    "a row for all": lambda m, h, x: of_one(h, m.rows[:1].repeat_interleave(len(x), 0)),
    "words, written": lambda m, h, x: of_one(h, written(h.new_zeros(len(x), 50), (numbers(x), x[:, 0])) @ m.rows),
    "a column, written": lambda m, h, x: of_one(h, written(h.new_zeros(len(x), 50), (numbers(x), 3)) @ m.rows),
    "words, scattered": lambda m, h, x: of_one(h, h.new_zeros(len(x), 50).scatter(1, x, 1.0) @ m.rows),
    "all, written": lambda m, h, x: h * written(h.detach(), slice(None)),
    "a token of each, written": lambda m, h, x: written(h, (slice(None), 0)),
    "a feature, written": lambda m, h, x: written(h, (..., 0)),
    "slice_scatter of all": lambda m, h, x: torch.slice_scatter(h, h * 2, 0, 0),
    "select_scatter of tokens": lambda m, h, x: h.select_scatter(h[:, 0] * 2, 1, 3),
}

QUICK = {"a row of a table", "the first, written", "a triangle", "the first", "a token of its own", "words, written"}


def stepped(body: Body, chunks: int) -> tuple[list[Any], float]:
    """The warnings of a step, and how far its loss and gradients are from the plain model's."""
    model = Placed(body)
    plain = copy.deepcopy(model)
    x, y = torch.randint(0, 10, (6, 5)), torch.randn(6, 5, 8, dtype=torch.float64)
    want = F.mse_loss(plain(x), y)
    want.backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with closing(fxpipe.compile(model, devices=1, chunks=chunks)) as pipe:
            loss = pipe.step(x, target=y, loss_fn=nn.MSELoss())
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
    apart = [(a - b).abs().max() for a, b in pairs if a is not None and b is not None]
    return [one.message for one in caught if one.category is MixedSamplesWarning], float(max(*apart, abs(loss - want)))


@pytest.mark.parametrize("name", mostly_slow(REFUSED, QUICK.__contains__, every=4))
def test_numbers_of_samples_are_refused_wherever_they_go(name: str) -> None:
    with pytest.raises(CaptureError, match=r"(?s)test_places_in_the_batch.py:\d+.*made of the numbers of the samples"):
        stepped(REFUSED[name], 2)


@pytest.mark.parametrize("name", mostly_slow(MIXES, QUICK.__contains__, every=4))
def test_what_writes_some_samples_is_warned_about(name: str) -> None:
    (said,), apart = stepped(MIXES[name], 2)
    assert "writes rows of some samples of f64[b, 5, 8], and not of others" in str(said)
    assert apart > 1e-4


@pytest.mark.parametrize("name", mostly_slow(RIGHT, QUICK.__contains__, every=4))
def test_what_is_the_same_for_all_samples_is_right(name: str) -> None:
    said, apart = stepped(RIGHT[name], 3)
    assert not said
    assert apart < 1e-9


@pytest.mark.parametrize("name", mostly_slow(REFUSED | MIXES, "a row of a table".__eq__, every=8))
def test_one_micro_batch_has_the_places_of_the_batch(name: str) -> None:
    said, apart = stepped((REFUSED | MIXES)[name], 1)
    assert not said
    assert apart < 1e-9
