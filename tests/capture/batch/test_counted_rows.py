"""Inputs with rows of samples that another input counts, as the patches of images of any size are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import InputError, MixedSamplesWarning
from fxpipe.ir.sample_lists import counted
from tests.capture.batch.test_sample_lists import is_step_of
from tests.helpers.marks import mostly_slow

IMAGE, LENGTH = 0, 9
ROWS = {"patches": fxpipe.rows("grid")}


class Reader(nn.Module):
    """A text with places for the features of an image's patches, as many as its grid says."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.words, self.tower = nn.Embedding(20, 8), Tower(whole)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, ids: Tensor, patches: Tensor, grid: Tensor) -> Tensor:
        x = self.words(ids)
        x = x.masked_scatter((ids == IMAGE).unsqueeze(-1).expand_as(x), self.tower(patches, grid))
        return self.head(torch.tanh(self.body(x)) + x)


class Tower(nn.Module):
    """Attention among the patches of an image, one image at a time if it is kept `whole`."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole, self.enter, self.leave = whole, nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        h = torch.tanh(self.enter(patches))
        if self.whole:
            images = h.split(grid.prod(-1).tolist())
            h = torch.cat([F.scaled_dot_product_attention(*[one[None]] * 3)[0] for one in images])
        return self.leave(h)


def batch(grids: tuple[tuple[int, int], ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 20, (len(grids), LENGTH), generator=draw)
    for row, (height, width) in zip(ids, grids, strict=True):
        row[1 : 1 + height * width] = IMAGE
    count = sum(height * width for height, width in grids)
    return ids, torch.randn(count, 6, dtype=torch.float64, generator=draw), torch.tensor(grids)


def token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), (ids % 5).flatten())


@pytest.fixture(autouse=True)
def _nothing_mixes() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* kept whole:")
        warnings.simplefilter("error", MixedSamplesWarning)
        yield


WAYS: dict[str, dict[str, Any]] = {
    "gpipe": {"chunks": 2},
    "1f1b": {"chunks": 3, "schedule": "1f1b"},
    "single samples": {"chunks": 5, "schedule": "interleaved", "stages_per_device": 2},
    "code": {"chunks": 3, "schedule": "zb-h1", "backward": "code"},
    "recomputed": {"chunks": 2, "checkpoint": "always", "schedule": "1f1b"},
    "replicas": {"chunks": 2, "replicas": (1, 2)},
    "uncut": {"chunks": 1},
}
GRIDS = ((1, 3), (2, 2), (1, 1), (2, 3), (1, 2))


@pytest.mark.parametrize("way", mostly_slow(WAYS, lambda way: way == "1f1b"))
@pytest.mark.parametrize("whole", mostly_slow([False, True], (False).__eq__))
def test_steps_are_those_of_the_model(way: str, whole: bool) -> None:
    """Also with another number of samples, and of patches."""
    model = Reader(whole).double()
    devices = 3 if way == "replicas" else 2
    pipe = fxpipe.compile(copy.deepcopy(model), devices=devices, batch_dim=ROWS, **WAYS[way])
    for grids in (GRIDS, (*GRIDS[::-1], (2, 4)), GRIDS):
        given = batch(grids, len(grids))
        is_step_of(
            model, pipe, token_loss(model(*given), given[0]), pipe.step(*given, target=given[0], loss_fn=token_loss)
        )
        torch.testing.assert_close(pipe(*given), model(*given))


@cache
def shared() -> tuple[Reader, Any]:
    torch.manual_seed(0)
    model = Reader().double()
    return model, fxpipe.compile(copy.deepcopy(model), devices=2, chunks=3, batch_dim=ROWS)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 4)), min_size=2, max_size=6), st.integers(0, 9))
def test_any_grids(grids: list[tuple[int, int]], seed: int) -> None:
    model, pipe = shared()
    given = batch(tuple(grids), seed)
    is_step_of(model, pipe, token_loss(model(*given), given[0]), pipe.step(*given, target=given[0], loss_fn=token_loss))


class Nodes(nn.Module):
    """Classes of the nodes of graphs, of which each sample has its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, nodes: Tensor, count: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(nodes)))


LOSSES = {
    "mean": F.cross_entropy,
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "by the number": lambda out, y: F.cross_entropy(out, y, reduction="sum") / out.shape[0],
    "ignored": lambda out, y: F.cross_entropy(out, y, ignore_index=0),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_rows(loss: str) -> None:
    """A mean over rows is that of all rows of the batch, whose samples have different numbers of them."""
    torch.manual_seed(0)
    model, loss_fn = Nodes().double(), LOSSES[loss]
    by = fxpipe.rows("count")
    pipe = fxpipe.compile(copy.deepcopy(model), devices=1, chunks=2, batch_dim={"nodes": by, "target": by})
    count = torch.tensor([1, 6, 2, 2, 4])
    nodes, labels = torch.randn(15, 6, dtype=torch.float64), torch.randint(0, 3, (15,))
    found = pipe.step(nodes, count, target=labels, loss_fn=loss_fn)
    is_step_of(model, pipe, loss_fn(model(nodes, count), labels), found)


def test_what_a_call_returns_of_rows_is_joined() -> None:
    model = Nodes().double()
    pipe = fxpipe.compile(model, devices=1, chunks=2, batch_dim={"nodes": fxpipe.rows("count")})
    nodes, count = torch.randn(15, 6, dtype=torch.float64), torch.tensor([1, 6, 2, 2, 4])
    torch.testing.assert_close(pipe(nodes, count), model(nodes, count))


def test_a_saved_pipe_counts_rows(tmp_path: Path) -> None:
    model = Reader().double()
    pipe = fxpipe.compile(copy.deepcopy(model), devices=2, chunks=2, batch_dim=ROWS)
    given = batch(GRIDS)
    expected = pipe(*given)
    pipe.save(tmp_path / "saved")
    loaded = fxpipe.load(tmp_path / "saved", copy.deepcopy(model))
    torch.testing.assert_close(loaded(*given), expected)
    other = batch(GRIDS[::-1])
    torch.testing.assert_close(loaded(*other), model(*other))


def test_a_call_is_verified() -> None:
    pipe = fxpipe.compile(Reader().double(), devices=2, chunks=2, batch_dim=ROWS)
    assert pipe.verify(*batch(GRIDS)).ok
    model = Reader().double()
    model.body = nn.Sequential(nn.Linear(8, 8).double(), nn.Dropout(0.1))  # type: ignore[assignment]
    found = fxpipe.compile(model, devices=2, chunks=2, batch_dim=ROWS).verify(*batch(GRIDS))
    assert any("cannot be given the rows of one that another input counts" in note for note in found.notes)


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another number": ({}, {"patches": torch.zeros(3, 6)}, "patches has 3 rows, and by grid the samples have 3, 4,"),
    "no such input": ({"patches": fxpipe.rows("girds")}, {}, "girds counts.*the tensors are ids, patches, grid"),
    "fractions": ({}, {"grid": torch.rand(5, 2)}, "grid is to count rows, and is no tensor of whole numbers"),
    "a gradient": ({}, {"patches": torch.zeros(16, 6, requires_grad=True)}, r"write patches\.detach\(\)"),
    "another batch": ({}, {"ids": torch.ones(4, LENGTH, dtype=torch.long)}, "no common batch size"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    change, inputs, message = BAD[name]
    pipe = fxpipe.compile(Reader(), devices=2, chunks=2, batch_dim=ROWS | change)
    given = dict(zip(("ids", "patches", "grid"), batch(GRIDS), strict=True)) | inputs
    with pytest.raises(InputError, match=message):
        pipe(**given)


def test_who_does_not_say_who_counts_is_told_how() -> None:
    pipe = fxpipe.compile(Reader().double(), devices=2, chunks=2)
    with pytest.raises(InputError, match=r"or batch_dim=\{'patches': fxpipe.rows\('grid'\)\} if grid says how many"):
        pipe(*batch(GRIDS))


def test_samples_with_fewer_places_than_rows_are_refused() -> None:
    """In the whole batch they would get those of others."""
    pipe = fxpipe.compile(Reader().double(), devices=2, chunks=2, batch_dim=ROWS)
    ids, patches, grid = batch(((1, 3), (1, 3), (1, 3), (1, 3)))
    ids[0, 3], ids[3, 5] = 7, IMAGE  # the last sample has a place more, and the first one less
    with pytest.raises(InputError, match="a mask has 40 places, and 48 values of a micro-batch's samples"):
        pipe(ids, patches, grid)
    whole = fxpipe.compile(Reader().double(), devices=2, chunks=1, batch_dim=ROWS)
    torch.testing.assert_close(whole(ids, patches, grid), whole.model(ids, patches, grid))


@pytest.mark.parametrize("single", [False, True])
def test_rows_in_their_places_without_counts(single: bool) -> None:
    """The same check where each sample has as many rows; a mask that is true once, or for all elements of a row."""

    class Puts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.features, self.head = nn.Embedding(20, 8), nn.Linear(6, 16), nn.Linear(8, 5)

        def forward(self, ids: Tensor, image: Tensor) -> Tensor:
            x, features = self.words(ids), self.features(image).view(-1, 8)
            if single:
                return self.head(x.masked_scatter((ids == IMAGE).unsqueeze(-1), features))
            x = x.clone()
            x[ids == IMAGE] = features
            return self.head(x)

    model = Puts().double()
    ids, _, _ = batch(((1, 2), (2, 1), (1, 2), (1, 2), (2, 1)))
    image = torch.randn(5, 6, dtype=torch.float64)
    pipe = fxpipe.compile(copy.deepcopy(model), devices=2, chunks=3)
    found = pipe.step(ids, image, target=ids, loss_fn=token_loss)
    is_step_of(model, pipe, token_loss(model(ids, image), ids), found)
    reasons = [stage.autograd_because for stage in pipe.build.program.stages if stage.autograd_because]
    assert [("a size that only a run tells" in reason) for reason in reasons] == ([] if single else [True])


def test_rows_and_back() -> None:
    rows, counts = torch.randn(6, 3), torch.tensor([[1, 2], [0, 5], [2, 2]])
    made = counted("rows", rows, "counts", counts)
    assert made.places.sum(1).tolist() == [2, 0, 4]
    torch.testing.assert_close(made.together(), rows)


# Parts of samples that are as long as a tensor says -------------------------------------------------------------------


class Lengths(nn.Module):
    """Goes on only with sizes that data decide, so that it is kept whole: it takes and gives as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x + self.fc(torch.cat([part.softmax(0) for part in x.split(lengths.tolist())]))
        return x * 2 if x.shape[0] > 1 else x


class Cropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(6, 8), nn.ModuleList(Lengths() for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        rows = torch.cat([one[:length] for one, length in zip(self.first(x), lengths, strict=True)])
        for layer in self.layers:
            rows = layer(rows, lengths)
        return torch.stack([part.sum(0) for part in rows.split(lengths.tolist())])


class Cropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.crop, self.head = Cropping(), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.crop(x, lengths))


@pytest.mark.filterwarnings("ignore:.*is kept whole")
@pytest.mark.parametrize("chunks", mostly_slow([1, 2, 3], (2).__eq__))
def test_samples_cropped_to_their_lengths(chunks: int) -> None:
    torch.manual_seed(0)
    model, x, target = Cropped().double(), torch.randn(4, 5, 6).double(), torch.randn(4, 3).double()
    pipe = fxpipe.compile(copy.deepcopy(model), devices=2, chunks=chunks)
    for lengths in (torch.tensor([2, 3, 5, 2]), torch.tensor([4, 2, 3, 2])):
        model.zero_grad(), pipe.model.zero_grad()
        found = pipe.step(x, lengths, target=target, loss_fn=F.mse_loss)
        is_step_of(model, pipe, F.mse_loss(model(x, lengths), target), found)
