"""Batches that are lists with an item for each sample, such as the targets of a detector."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import CaptureError, InputError, PlanError
from fxpipe.ir.sample_lists import SampleList, packed
from tests.helpers.marks import mostly_slow

Targets = list[dict[str, Any]]


class Boxes(nn.Module):
    """Three boxes in each image."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.boxes = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.down(x))))
        return self.boxes(x).view(-1, 3, 4)


class Nearest(nn.Module):
    """The mean over samples of the distance to the nearest boxes."""

    def forward(self, boxes: Tensor, targets: Targets) -> Tensor:
        return torch.stack([nearest(one, target) for one, target in zip(boxes, targets, strict=True)]).mean()


class WithLoss(nn.Module):
    """A model that computes its own loss, in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.detector, self.criterion = Boxes(), Nearest()

    def forward(self, x: Tensor, labels: Targets | None = None) -> dict[str, Tensor]:
        boxes = self.detector(x)
        return {"boxes": boxes} if labels is None else {"loss": self.criterion(boxes, labels), "boxes": boxes}


class Bags(nn.Module):
    """Each sample is a bag of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.head = Pool(), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, bags: list[Tensor]) -> Tensor:
        return self.head(self.pool(bags))


class Pool(nn.Module):
    def forward(self, bags: list[Tensor]) -> Tensor:
        return torch.stack([bag.mean(0) for bag in bags])


def nearest(boxes: Tensor, target: dict[str, Any]) -> Tensor:
    order = torch.cdist(boxes.detach(), target["boxes"]).min(0).indices.tolist()
    return F.l1_loss(boxes[order], target["boxes"]) * target["weight"]


def mean_loss(boxes: Tensor, targets: Targets) -> Tensor:
    terms = []
    for sample, target in zip(boxes, targets, strict=True):
        terms.append(nearest(sample, target))
    return torch.stack(terms).mean()


def of_boxes(boxes: Tensor, targets: Targets) -> Tensor:
    total = 0.0
    for sample, target in zip(boxes, targets, strict=True):
        total = total + nearest(sample, target) + target["kinds"].sum() * sample.mean()
    return total / len(targets)  # type: ignore[return-value]


def targets_of(counts: tuple[int, ...], seed: int = 0) -> Targets:
    """Targets with so many boxes, and a number, an image's own number, and words that are the same for all."""
    draw = torch.Generator().manual_seed(seed)
    return [
        {
            "boxes": torch.rand(count, 4, generator=draw, dtype=torch.float64),
            "kinds": torch.randint(0, 5, (count,), generator=draw),
            "image": torch.tensor(at),
            "weight": 0.5 + at,
            "from": ("camera", None),
        }
        for at, count in enumerate(counts)
    ]


def images(count: int) -> Tensor:
    return torch.randn(count, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(count))


@pytest.fixture(autouse=True)
def _kept_whole_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* kept whole")
        yield


def is_step_of(model: nn.Module, pipe: Any, loss: Tensor, found: Tensor) -> None:
    model.zero_grad()
    loss.backward()
    torch.testing.assert_close(found, loss.detach(), rtol=1e-9, atol=1e-12)
    of = dict(model.named_parameters())
    for path, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, of[path].grad, rtol=1e-9, atol=1e-12, msg=path)
    pipe.zero_grad()


WAYS: dict[str, dict[str, Any]] = {
    "gpipe": {"chunks": 2},
    "1f1b": {"chunks": 3, "schedule": "1f1b"},
    "single samples": {"chunks": 5, "schedule": "interleaved"},
    "code": {"chunks": 3, "schedule": "zb-h1", "backward": "code"},
    "recomputed": {"chunks": 2, "checkpoint": "always", "schedule": "1f1b"},
    "replicas": {"chunks": 2, "replicas": (1, 2)},
    "uncut": {"chunks": 1},
}
LOSSES = {"mean": mean_loss, "sum by the number": of_boxes}


@pytest.mark.parametrize("way", mostly_slow(WAYS, lambda way: way in ("1f1b", "code")))
@pytest.mark.parametrize("loss", LOSSES)
def test_steps_are_those_of_the_model(loss: str, way: str) -> None:
    """Also with another number of samples, and of boxes."""
    model, loss_fn = Boxes().double(), LOSSES[loss]
    pipe = fxpipe.compile(copy.deepcopy(model), devices=3 if way == "replicas" else 2, **WAYS[way])
    for counts in ((1, 3, 2, 2, 4, 1), (2, 1, 1, 1, 5), (1, 3, 2, 2, 4, 1)):
        x, targets = images(len(counts)), targets_of(counts)
        is_step_of(model, pipe, loss_fn(model(x), targets), pipe.step(x, target=targets, loss_fn=loss_fn))


@pytest.mark.parametrize("way", mostly_slow(WAYS, "gpipe".__eq__))
def test_a_submodule_with_the_loss_is_kept_whole_and_the_rest_cut(way: str) -> None:
    model = WithLoss().double()
    options: Any = {"devices": 3 if way == "replicas" else 2, "reduce": {"loss": "mean"}, **WAYS[way]}
    pipe = fxpipe.compile(copy.deepcopy(model), **options)
    count = 2 * WAYS[way]["chunks"]
    for seed in range(2):
        x, labels = images(count), targets_of((1, 3, 2, 1, 1, 2, 4, 1, 1, 2)[:count], seed)
        is_step_of(model, pipe, model(x, labels=labels)["loss"], pipe.step(x, labels=labels))
        torch.testing.assert_close(pipe(x)["boxes"], model(x)["boxes"])
    assert len(pipe.stages) >= 2


@pytest.mark.parametrize("as_dict", [False, True])
def test_lists_of_tensors(as_dict: bool) -> None:
    class Nested(Bags):
        def forward(self, bags: Any) -> Tensor:
            return super().forward(bags["bags"])

    model = (Nested if as_dict else Bags)().double()
    name = "bags['bags']" if as_dict else "bags"
    pipe = fxpipe.compile(copy.deepcopy(model), devices=2, chunks=3, batch_dim={name: "items"})
    for lengths in ((2, 5, 1, 3, 3), (1, 1, 7)):
        bags: Any = [images(length) for length in lengths]
        given = {"bags": bags, "from": "camera"} if as_dict else bags
        torch.testing.assert_close(pipe(given), model(given))


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=6), st.integers(2, 4), st.data())
def test_any_sizes(counts: list[int], chunks: int, data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.tuples(*[st.integers(1, 3)] * 2), min_size=len(counts), max_size=len(counts)))

    class Sums(nn.Module):
        def forward(self, items: list[dict[str, Any]]) -> Tensor:
            return torch.stack([item["a"].sum() * item["n"] + item["b"].mean() for item in items])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sums, self.scale = Sums(), nn.Linear(1, 2).double()

        def forward(self, x: Tensor, items: list[dict[str, Any]]) -> Tensor:
            return self.scale(self.sums(items)[:, None] + x)

    items = [
        {"a": torch.randn(count, 3, dtype=torch.float64), "n": at, "b": torch.randn(shape, dtype=torch.float64)}
        for at, (count, shape) in enumerate(zip(counts, shapes, strict=True))
    ]
    x = torch.randn(len(counts), 1, dtype=torch.float64)
    model = Model()
    pipe = fxpipe.compile(copy.deepcopy(model), devices=2, chunks=chunks, batch_dim={"items": "items"})
    torch.testing.assert_close(pipe(x, items), model(x, items))


def test_what_is_only_passed_on_is_the_user_s_own() -> None:
    class Passes(Boxes):
        def forward(self, x: Tensor, names: Targets) -> Any:
            return super().forward(x), names, len(names)

    model = Passes().double()
    targets = targets_of((1, 2, 3, 1))
    boxes, found, count = fxpipe.compile(model, devices=2, chunks=2)(images(4), targets)
    assert found is targets
    assert count == 4
    torch.testing.assert_close(boxes, model(images(4), targets)[0])


ASKS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "a list": lambda h, t: 2 * h if isinstance(t, list) else h,
    "one of several": lambda h, t: 2 * h if isinstance(t, (tuple, list)) else h,
    "no tensor": lambda h, t: h if isinstance(t, Tensor) else 2 * h,
    "none": lambda h, t: h if t is None else 2 * h,
    "not empty": lambda h, t: 2 * h if t else h,
    "how many": lambda h, t: h * (len(t) > 1),
    "of dicts": lambda h, t: 2 * h if isinstance(t[0], dict) else h,
    "equal": lambda h, t: 2 * h if t == [] else h,
    "a part": lambda h, t: h * len(t[:1]),
    "together": lambda h, t: h * (len([None] + t) > 2),  # noqa: RUF005
    "the other way": lambda h, t: h * (len(t + [None]) > 2),  # noqa: RUF005
    "unpacked": lambda h, t: h * (len([*t, None]) > 2),
    "in it": lambda h, t: 2 * h if None in t else h,
    "copied": lambda h, t: 2 * h if t.copy()[0] is t[0] else h,
}


@pytest.mark.parametrize("name", mostly_slow(ASKS, [*ASKS][::2].__contains__))
def test_what_forward_asks_of_a_list_is_true(name: str) -> None:
    """What ends the trace is kept whole, and asks the list itself."""

    class Asking(WithLoss):
        def forward(self, x: Tensor, labels: Any = None) -> dict[str, Tensor]:
            return super().forward(ASKS[name](x, labels), labels)

    model = Asking().double()
    pipe = fxpipe.compile(copy.deepcopy(model), devices=1, chunks=2, reduce={"loss": "mean"})
    x, labels = images(4), targets_of((1, 2, 3, 1))
    is_step_of(model, pipe, model(x, labels)["loss"], pipe.step(x, labels=labels))


def sum_of_type(h: Tensor, labels: Any) -> Tensor:
    return h.sum() * 2 if type(labels) is list else h.sum()


@pytest.mark.filterwarnings("ignore:.*is kept whole")
def test_what_compares_its_type_is_kept_whole() -> None:
    class Doubles(nn.Module):
        def forward(self, h: Tensor, found: Any) -> Tensor:
            return 2 * h if type(found) in (list, tuple) else h

    class Inside(WithLoss):
        def __init__(self) -> None:
            super().__init__()
            self.doubles = Doubles()

        def forward(self, x: Tensor, found: Any = None) -> dict[str, Tensor]:
            return super().forward(self.doubles(x, found), found)

    class AtTop(WithLoss):
        def forward(self, x: Tensor, labels: Any = None) -> dict[str, Tensor]:
            return super().forward(x if type(x) is list else 2 * x if list is type(labels) else x, labels)

    x, labels = images(4), targets_of((1, 2, 3, 1))
    for model, name in ((Inside().double(), "found"), (AtTop().double(), "labels")):
        pipe = fxpipe.compile(copy.deepcopy(model), devices=1, chunks=2, reduce={"loss": "mean"})
        is_step_of(model, pipe, model(x, labels)["loss"], pipe.step(x, **{name: labels}))
    boxes = Boxes().double()
    pipe = fxpipe.compile(copy.deepcopy(boxes), devices=1, chunks=2, reduce="sum")
    is_step_of(boxes, pipe, sum_of_type(boxes(x), labels), pipe.step(x, target=labels, loss_fn=sum_of_type))


def test_a_saved_pipe_takes_lists(tmp_path: Path) -> None:
    model = WithLoss().double()
    pipe = fxpipe.compile(copy.deepcopy(model), devices=2, chunks=2, reduce={"loss": "mean"})
    x, labels = images(4), targets_of((1, 2, 3, 1))
    expected = pipe.step(x, labels=labels)
    pipe.save(tmp_path / "saved")
    loaded = fxpipe.load(tmp_path / "saved", copy.deepcopy(model))
    torch.testing.assert_close(loaded.step(x, labels=labels), expected)


def test_rows_or_items() -> None:
    """A list of dicts that may be either is refused, and taken as it is told."""
    x, targets = images(2), targets_of((2, 2))
    for target in targets:
        del target["image"]
    with pytest.raises(InputError, match="target has 2 items, and the tensors in them have 2 rows"):
        fxpipe.compile(Boxes().double(), devices=2, chunks=2).step(x, target=targets, loss_fn=of_boxes)
    model = Boxes().double()
    pipe = fxpipe.compile(copy.deepcopy(model), devices=2, chunks=2, batch_dim={"target": "items"})
    is_step_of(model, pipe, of_boxes(model(x), targets), pipe.step(x, target=targets, loss_fn=of_boxes))


def test_levels_are_no_samples() -> None:
    """As many tensors as samples, each with all samples."""

    class Levels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor, levels: list[Tensor]) -> Tensor:
            return self.fc(x + levels[0] + levels[1])

    model, x = Levels(), torch.randn(2, 3)
    levels = [torch.randn(2, 3), torch.randn(2, 3)]
    torch.testing.assert_close(fxpipe.compile(model, devices=1, chunks=2)(x, levels), model(x, levels))


def test_as_many_tensors_as_samples_may_be_anything() -> None:
    """Such as a scale for each layer: to be told."""

    class Layers(Boxes):
        def forward(self, x: Tensor, scales: list[Tensor]) -> Tensor:  # type: ignore[override]
            for scale in scales:
                x = torch.tanh(x * scale)
            return super().forward(x)

    model, x, scales = Layers().double(), images(2), [torch.rand(6).double() for _ in range(2)]
    with pytest.raises(InputError, match="or 'items' for a list whose items are the samples"):
        fxpipe.compile(model, devices=2, chunks=2)(x, scales)
    pipe = fxpipe.compile(copy.deepcopy(model), devices=2, chunks=2, batch_dim={"scales": None})
    torch.testing.assert_close(pipe(x, scales), model(x, scales))


def test_a_list_of_tensors_beside_the_targets() -> None:
    """As detectors take them: images of several sizes, and targets."""

    class Detector(WithLoss):
        def __init__(self) -> None:
            super().__init__()
            self.pool = Pool()

        def forward(self, bags: list[Tensor], labels: Targets) -> dict[str, Tensor]:  # type: ignore[override]
            return super().forward(self.pool(bags), labels)

    model, counts = Detector().double(), (1, 3, 2, 2)
    pipe = fxpipe.compile(copy.deepcopy(model), devices=2, chunks=2, reduce={"loss": "mean"})
    bags, labels = [images(1 + count) for count in counts], targets_of(counts)
    is_step_of(model, pipe, model(bags, labels)["loss"], pipe.step(bags, labels))


class Case(NamedTuple):
    change: dict[str, Any]
    message: str


@pytest.mark.parametrize(
    "case",
    [
        Case({"more": 1}, r"target\[\.\.\.\] have other keys from sample to sample"),
        Case({"from": ("film", None)}, r"target\[\.\.\.\]\['from'\]\[0\] differ from sample to sample: camera, film"),
        Case({"boxes": torch.rand(3, 4)}, r"\['boxes'\] differ in their types, dimensions or devices"),
        Case({"from": ("camera",)}, r"target\[\.\.\.\]\['from'\] differ in length from sample to sample: 2, 1"),
    ],
)
def test_items_that_are_not_alike_are_refused(case: Case) -> None:
    targets = targets_of((1, 2, 3))
    targets[1] |= case.change
    pipe = fxpipe.compile(Boxes().double(), devices=2, chunks=3)
    with pytest.raises(InputError, match=case.message):
        pipe.step(images(3), target=targets, loss_fn=of_boxes)


def test_other_words_of_batch_dim_are_refused() -> None:
    with pytest.raises(PlanError, match=r"a dict of a dimension, 'items', fxpipe.rows\(\.\.\.\) or None by input"):
        fxpipe.compile(Boxes(), devices=2, chunks=2, batch_dim={"x": "item"})  # type: ignore[dict-item]
    with pytest.raises(InputError, match="there is no list of that name"):
        fxpipe.compile(Boxes(), devices=2, chunks=2, batch_dim={"x": "items"})(torch.randn(4, 6))


def test_a_model_that_looks_into_a_list_itself_is_refused_with_the_line() -> None:
    class Stacks(Boxes):
        def forward(self, bags: list[Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(torch.stack([bag.sum(0) for bag in bags]))

    class Refused(Stacks):
        def forward(self, bags: list[Tensor]) -> Tensor:  # type: ignore[override]
            return super().forward(bags).mean(0)  # of all samples, so that no cut is right

    of_items: Any = {"bags": "items"}
    bags = [images(length).float() for length in (1, 2, 3)]
    with pytest.warns(UserWarning, match="looks into a list whose items are the samples"):
        found = fxpipe.compile(model := Stacks(), devices=2, chunks=3, batch_dim=of_items)(bags)
    torch.testing.assert_close(found, model(bags))
    with pytest.raises(CaptureError):
        fxpipe.compile(Refused(), devices=2, chunks=3, batch_dim=of_items)(bags)


def test_packed_lists_are_the_lists() -> None:
    targets: list[Any] = [
        {"a": torch.zeros(0, 3), "n": 2, "t": (torch.tensor(1), [True, 2.5]), "w": None},
        {"a": torch.ones(4, 3), "n": -1, "t": (torch.tensor(7), [False, 0.5]), "w": None},
    ]
    found = SampleList(packed("targets", targets)).items()
    assert [one["n"] for one in found] == [2, -1]
    assert [one["t"][1] for one in found] == [[True, 2.5], [False, 0.5]]
    assert all(type(one["n"]) is int for one in found)
    for one, own in zip(found, targets, strict=True):
        assert torch.equal(one["a"], own["a"])
        assert torch.equal(one["t"][0], own["t"][0])
        assert one["w"] is None


@pytest.mark.parametrize("own_sizes", [False, True])
def test_samples_of_a_list_that_are_divided_by_their_number_are_told(own_sizes: bool) -> None:
    class Divided(Pool):
        def forward(self, bags: list[Tensor]) -> Tensor:
            return super().forward(bags) / len(bags)

    for pool, told in ((Pool(), 0), (Divided(), 1)):
        model = Bags().double()
        model.pool = pool
        bags = [torch.randn(1 + own_sizes * at, 6, dtype=torch.float64) for at in range(6)]
        with (
            warnings.catch_warnings(record=True) as found,
            closing(fxpipe.compile(model, 2, 2, batch_dim={"bags": "items"})) as pipe,
        ):
            warnings.simplefilter("always")
            pipe(bags)
        assert sum(issubclass(one.category, fxpipe.MixedSamplesWarning) for one in found) == told
