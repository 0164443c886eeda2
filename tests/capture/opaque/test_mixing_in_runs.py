"""Submodules that are kept whole and mix the samples of a batch: two runs show it, and the user is warned."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe
from fxpipe.capture.opaque.mixing_in_runs import Contents, in_another_order, mixing
from fxpipe.errors import MixedSamplesWarning
from tests.helpers.marks import mostly_slow


def _experts(h: Tensor, room: int) -> Tensor:
    """Tokens of all samples choose one of two experts, each of which takes the first `room` of them."""
    tokens = h.reshape(-1, h.shape[-1])
    chosen = tokens[:, 0] > 0
    place = torch.where(chosen, chosen.cumsum(0), (~chosen).cumsum(0))
    return torch.where((place <= room)[:, None], tokens * 2, tokens).reshape(h.shape)


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h - h.mean(0),
    "the sample before": lambda h: h + torch.cat([torch.zeros_like(h[:1]), h[:-1]]),
    "the sample behind": lambda h: h + torch.cat([h[1:], torch.zeros_like(h[:1])]),
    "the first sample": lambda h: h - h[:1],
    "the last sample": lambda h: h - h[-1:],
    "places": lambda h: h.flip(0),
    "numbers of places": lambda h: h + torch.arange(len(h))[:, None, None],
    "attention over samples": lambda h: F.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3).transpose(0, 1),
    "room for tokens": lambda h: _experts(h, 2),
    "the largest": lambda h: h + h.amax(0),
    "the largest number": lambda h: h * float(h.detach().amax()),
    "flat tokens": lambda h: (h.reshape(-1, 8) - h.reshape(-1, 8).mean(0)).view_as(h),
}
KEEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "by element": torch.tanh,
    "within a sample": lambda h: h - h.mean(1, keepdim=True),
    "room for all tokens": lambda h: _experts(h, 10**6),
    "flat tokens": lambda h: torch.softmax(h.reshape(-1, 8), -1).view_as(h),
    "a loop over samples": lambda h: torch.stack([one.cumsum(0) for one in h]),
    "drawn": lambda h: F.dropout(h),
    "drawn by Python": lambda h: h * torch.tensor([random.random() for _ in h])[:, None, None],
    "drawn by numpy": lambda h: h + torch.tensor(numpy.random.rand(*h.shape), dtype=h.dtype),
    "infinite": lambda h: h.masked_fill(h > 0, -torch.inf).exp(),
}


class Whole(nn.Module):
    """A submodule that is kept whole, because of a value that it reads."""

    def __init__(self, body: Callable[[Tensor], Tensor], norm: bool = False, buffer: bool = False) -> None:
        super().__init__()
        self.enter, self.body = nn.Linear(8, 8), body
        if buffer:
            self.register_buffer("table", torch.ones(8))
        self.norm = nn.BatchNorm1d(3) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.enter(x))
        if h.sum().item() > 1e9:
            h = 2 * h
        return self.body(h)


def _warned(model: nn.Module, rows: int, chunks: int) -> list[str]:
    x, y = torch.randn(rows, 3, 8), torch.randn(rows, 3, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = fxpipe.compile(model, devices=1, chunks=chunks)
        pipe.step(x, target=y, loss_fn=nn.MSELoss())
    return [str(one.message) for one in caught if one.category is MixedSamplesWarning]


@pytest.mark.parametrize(("rows", "chunks"), mostly_slow([(4, 2), (5, 4)], (5, 4).__eq__))
@pytest.mark.parametrize("name", mostly_slow(MIXES, [*MIXES][::2].__contains__))
def test_mixing_inside_of_what_is_kept_whole_is_said(name: str, rows: int, chunks: int) -> None:
    torch.manual_seed(0)
    (text,) = _warned(nn.Sequential(nn.Linear(8, 8), Whole(MIXES[name])), rows, chunks)
    assert "what 1, kept whole, returns for a sample depends on other samples" in text
    assert "reduce={'loss': 'mean'}" in text


def test_a_buffer_in_it_changes_nothing() -> None:
    torch.manual_seed(0)
    (text,) = _warned(nn.Sequential(nn.Linear(8, 8), Whole(MIXES["mean"], buffer=True)), 4, 2)
    assert "what 1, kept whole, returns for a sample depends on other samples" in text


@pytest.mark.parametrize("name", mostly_slow(KEEPS, [*KEEPS][::2].__contains__))
def test_samples_that_do_not_meet_are_not_warned_about(name: str) -> None:
    torch.manual_seed(0)
    assert not _warned(nn.Sequential(nn.Linear(8, 8), Whole(KEEPS[name])), 7, 2)


def test_statistics_of_batch_norm_are_those_of_each_micro_batch() -> None:
    assert not _warned(nn.Sequential(nn.Linear(8, 8), Whole(torch.tanh, norm=True)), 8, 2)


def test_only_the_submodule_that_mixes_is_named() -> None:
    torch.manual_seed(0)
    parts = Whole(torch.tanh), Whole(MIXES["mean"]), Whole(torch.sin)
    (text,) = _warned(nn.Sequential(*parts), 6, 2)
    assert "what 1, kept whole" in text


def test_a_whole_model_with_the_lengths_of_other_samples() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(8, 8)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            numbers = lengths.tolist()
            return torch.stack([h[:n].mean(0) for h, n in zip(self.enter(x), [5, *numbers[:-1]], strict=True)])

    torch.manual_seed(0)
    model, x, lengths = Shifted(), torch.randn(6, 5, 8), torch.tensor([1, 2, 3, 4, 5, 2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = fxpipe.compile(model, devices=1, chunks=2)
        out = pipe(x, lengths)
    parts = [model(*part) for part in zip(x.chunk(2), lengths.chunk(2), strict=True)]
    torch.testing.assert_close(out, torch.cat(parts))
    assert [one.category for one in caught].count(MixedSamplesWarning) == 1


def _ordinals(marks: Tensor) -> Tensor:
    """For each word that is marked, how many are before it in the batch."""
    places, seen = torch.zeros_like(marks), 0
    for sample, row in enumerate(marks.tolist()):
        for word, marked in enumerate(row):
            places[sample, word] = seen if marked else word
            seen += marked
    return places


def _in_each(marks: Tensor) -> Tensor:
    return torch.stack([_ordinals(row[None])[0] for row in marks])


class Positions(nn.Module):
    """Positions that Python makes, i64[b, 5], which turn the words or find rows of a table; beside them, others that
    are not used."""

    def __init__(self, use: str, positions: Callable[[Tensor], Tensor], others: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.table, self.out = nn.Embedding(10, 8), nn.Embedding(99, 8), nn.Linear(8, 8)
        self.use, self.positions, self.others = use, positions, others
        self.double()

    def places(self, marks: Tensor) -> tuple[Tensor, Tensor]:
        return self.others(marks), self.positions(marks)

    def forward(self, x: Tensor) -> Tensor:
        h, (_, at) = self.words(x), self.places((x > 5).long())
        match self.use:
            case "turned":
                h = h * torch.cos(at[..., None].double() / 3)
            case "table":
                h = h + self.table(at)
            case "masked":
                h = h * (at < 3)[..., None]
        return self.out(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize("use", mostly_slow(["turned", "table", "masked"], "table".__eq__))
@pytest.mark.parametrize("mixes", [True, False])
def test_whole_numbers_that_count_through_the_batch_are_said_to_mix(use: str, mixes: bool) -> None:
    model = Positions(use, _ordinals, _in_each) if mixes else Positions(use, _in_each, _ordinals)
    plain, x, y = copy.deepcopy(model), torch.randint(4, 10, (6, 5)), torch.randn(6, 5, 8, dtype=torch.float64)
    want = F.mse_loss(plain(x), y)
    want.backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = fxpipe.compile(model, devices=1, chunks=2).step(x, target=y, loss_fn=nn.MSELoss())
    said = [str(one.message) for one in caught if one.category is MixedSamplesWarning]
    apart = [abs(loss - want)]
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        if mine.grad is not None and other.grad is not None:
            apart.append((mine.grad - other.grad).abs().max())
    assert (max(apart) > 1e-4) == mixes
    assert mixes or max(apart) < 1e-9
    assert len(said) == mixes
    assert all("kept whole, returns for a sample depends on other samples" in one for one in said)


def test_one_micro_batch_mixes_as_it_likes() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Whole(MIXES["mean"])), torch.randn(6, 3, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = fxpipe.compile(model, devices=1, chunks=1)(x)
    torch.testing.assert_close(out, model(x))
    assert not [one for one in caught if one.category is MixedSamplesWarning]


@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(0, 2), st.integers(1, 3)),
    inner=st.booleans(),
    dim=st.integers(0, 1),
    seed=st.integers(0, 9),
)
def test_rows_of_samples_are_compared_in_either_order(
    sizes: tuple[int, int, int], inner: bool, dim: int, seed: int
) -> None:
    rows, more, each = sizes
    torch.manual_seed(seed)
    order = in_another_order(rows, rows + more)
    of_all = torch.randn(max(order) + 1, each, 4)

    def laid(samples: list[int], add: float = 0.0) -> Tensor:
        x = of_all[samples]
        x[samples.index(rows - 1)] += add
        return (x.transpose(0, 1) if inner else x).reshape(-1, 4).movedim(0, dim)

    one, two = list(range(rows)), order
    same = Contents([laid(one)], [laid(one)]), Contents([laid(two)], [laid(two)])
    assert not mixing(*same, rows, order)
    assert mixing(same[0], Contents(same[1].given, [laid(two, 1.0)]), rows, order)
    assert not mixing(same[0], Contents([laid(two, 1.0)], [laid(two, 1.0)]), rows, order)  # it was given other values


@pytest.mark.slow
@given(first=st.integers(0, 10), second=st.integers(0, 10))
def test_sizes_that_are_not_of_the_batch_show_nothing(first: int, second: int) -> None:
    one, two = (Contents([torch.ones(3)], [torch.randn(size)]) for size in (first, second))
    assert bool(mixing(one, two, 4, in_another_order(4, of=9))) == ((first, second) in ((4, 5), (8, 10)))
