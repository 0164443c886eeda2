"""Models that go through their samples one by one: right in every number of micro-batches, or refused with the line."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import closing
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import capture
from fxpipe.errors import CaptureError, MixedSamplesWarning
from tests.capture.batch.test_selected_rows import named, same_gradients
from tests.helpers.marks import mostly_slow

Body = Callable[[Any, Tensor, Tensor], Any]
LOOPS: list[Body] = []
REFUSED: list[Body] = []


class Model(nn.Module):
    """What `body` makes of x, f64[b, 6], and of h, f64[b, 3, 8]."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 24), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm, self.active, self.body = nn.LayerNorm(8), nn.ReLU(inplace=True), body
        self.double()

    def forward(self, x: Tensor) -> Any:
        made = self.body(self, x, self.first(x).view(-1, 3, 8))
        return self.last(made) if isinstance(made, Tensor) and made.dim() == 3 else made


def loop(body: Body) -> Body:
    LOOPS.append(body)
    return body


def refused(body: Body) -> Body:
    REFUSED.append(body)
    return body


@loop
def listed(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.stack([self.second(one).relu() for one in list(h)])


@loop
def counted(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.stack([self.norm(h[i]) * x[i, 0] for i in range(len(x))])


@loop
def unbound(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.stack([self.second(one) for one in h.transpose(0, 1).unbind(1)])


@loop
def padded_in_front(self: Any, x: Tensor, h: Tensor) -> Tensor:
    """What is made anew for each sample is joined with it, and with that of other samples."""
    whole, marks = [], []
    for one in h:
        mark = torch.zeros(2, 8, dtype=one.dtype)
        whole.append(torch.cat([torch.ones(1, 8, dtype=one.dtype), self.second(one[:2])]))
        marks.append(torch.cat([torch.ones(1, 8, dtype=one.dtype), mark]))
    return torch.stack(whole) + torch.stack(marks, 0) + torch.cat([mark[None, :1] for mark in marks], 0)


@loop
def in_two(self: Any, x: Tensor, h: Tensor) -> Tensor:
    """The second loop takes what the first one has joined, and single samples of it."""
    first = [self.second(one).relu() for one in h]
    joined = torch.stack(first)
    return torch.stack([self.norm(a) + b + c.mean() for a, b, c in zip(joined * 2, first, x, strict=True)])


@loop
def in_each_other(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.stack([torch.stack([self.second(row) for row in one]).sum(0) for one in h])


@loop
def kept(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.cat([self.second(one) for one in h.split(1)], dim=0)


@loop
def along_rows(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.cat([self.second(one) for one in h], 0).view(len(x), 3, 8)


@loop
def along_columns(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.stack([self.second(one) for one in h], 1).transpose(0, 1)


@loop
def padded(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return nn.utils.rnn.pad_sequence([self.second(one) for one in h], batch_first=True)


@loop
def ordered(self: Any, x: Tensor, h: Tensor) -> Tensor:
    """Each sample's rows in an order of its own, and rows of zeros that are made for each."""
    each = [one[one.detach().sum(1).argsort()] for one in h]
    return torch.stack([torch.cat([self.second(one[:2]), torch.zeros(1, 8, dtype=one.dtype)]) for one in each])


@loop
def in_place(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.stack([self.active(self.second(one)) for one in h])


@loop
def attends(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.stack([F.scaled_dot_product_attention(one[None], one[None], one[None])[0] for one in h])


@loop
def of_three(self: Any, x: Tensor, h: Tensor) -> Tensor:
    """Another dimension that is gone through, which may be of as many."""
    one, two, three = h.unbind(1)
    return torch.stack([self.second(a) * b for a, b in zip(one, two, strict=True)]) + three


@loop
def rejoined(self: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    one, two, three = torch.cat(list(h), dim=0), torch.stack([*h]), torch.concatenate([*h])
    two += 1  # a copy: h stays what it is
    return (one.tanh() + three).view_as(h), two * h


@loop
def columns(self: Any, x: Tensor, h: Tensor) -> Tensor:
    """The batch is a part of a dimension, before the columns."""
    return torch.cat(list(h), dim=1) * 2


@loop
def summed(self: Any, x: Tensor, h: Tensor) -> Tensor:
    total = 0
    for one in h:
        total = total + self.second(one).square().sum()
    return total  # type: ignore[return-value]


@loop
def shared(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return sum(self.second(one).square().mean() for one in h) / len(h)  # type: ignore[return-value]


@loop
def added_in_place(self: Any, x: Tensor, h: Tensor) -> Tensor:
    total = torch.zeros((), dtype=x.dtype)
    for one in h:
        total += self.second(one).square().mean() / x.shape[0]
    return total


@loop
def penalized(self: Any, x: Tensor, h: Tensor) -> Tensor:
    total = self.second.weight.norm()
    for one in h:
        total = total + self.second(one).sum()
    return total  # type: ignore[no-any-return]


@loop
def mean_of_terms(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.stack([F.mse_loss(self.second(one), one.detach().sort()[0]) for one in h]).mean()


@refused
def marked(self: Any, x: Tensor, h: Tensor) -> Tensor:
    """A mark for each sample, in a place of its own."""
    marks = []
    for number in range(len(x)):
        mark = torch.zeros(3, 8, dtype=x.dtype)
        mark[number % 3] = 1
        marks.append(mark)
    return h + torch.stack(marks)


@refused
def numbered(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.stack([self.second(one) * (i + 1) for i, one in enumerate(h)])


@refused
def turned(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.stack([self.second(one) for one in h][::-1])


@refused
def passed_on(self: Any, x: Tensor, h: Tensor) -> Tensor:
    made = [h[0]]
    for one in h[1:]:
        made.append(self.second(one) + made[-1])
    return torch.stack(made)


@refused
def differs_in_the_first(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return torch.stack([self.second(h[0]), *(self.norm(one) for one in h[1:])])


@refused
def unequal(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return nn.utils.rnn.pad_sequence([self.second(one[: 1 + i % 3]) for i, one in enumerate(h)])


@refused
def written(self: Any, x: Tensor, h: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    for i in range(len(h)):
        made[i] = self.second(h[i])
    return made


def flat(made: Any) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else tuple(made)


def inputs(samples: int) -> tuple[Tensor, ...]:
    return (torch.randn(samples, 6, dtype=torch.float64),)


def check(model: nn.Module, chunks: int, samples: int, batch: Callable[[int], tuple[Tensor, ...]] = inputs) -> None:
    """Calls and gradients are the plain model's, without a warning; `batch` makes the arguments."""
    plain = copy.deepcopy(model)
    with warnings.catch_warnings(), closing(fxpipe.compile(model, 2, chunks)) as pipe:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)  # torch's, of attention in a vmap
        for rows in (samples, samples, 2 * samples):
            given = batch(rows)
            expected, found = flat(plain(*given)), flat(pipe(*given))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
            for made in (expected, found):
                sum(one.square().sum() for one in made).backward()  # type: ignore[union-attr]
            same_gradients(model, plain)
        assert len(pipe.stages) == 2


@pytest.mark.parametrize("body", mostly_slow(LOOPS, [padded, shared, attends, in_place].__contains__), ids=named)
def test_a_loop_is_the_models(body: Body) -> None:
    """In micro-batches of 3 and 2 samples; and then of as many, and more."""
    check(Model(body), 3, 8)


@pytest.mark.parametrize("body", mostly_slow(LOOPS, [listed].__contains__), ids=named)
def test_micro_batches_of_one_sample(body: Body) -> None:
    check(Model(body), 4, 7)


@pytest.mark.parametrize("body", mostly_slow([*LOOPS, *REFUSED], [shared].__contains__), ids=named)
def test_uncut_it_is_the_models(body: Body) -> None:
    if body is not unequal:
        check(Model(body), 1, 4)


@pytest.mark.parametrize("body", REFUSED, ids=named)
def test_samples_that_are_not_treated_alike(body: Body) -> None:
    with closing(fxpipe.compile(Model(body), 2, 2)) as pipe, pytest.raises(CaptureError, match=r"sample_loops.py:\d+"):
        pipe(torch.randn(6, 6, dtype=torch.float64))
    torch.ones(2).requires_grad_()  # which raises in a vmap that was left open


WAYS: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "zb-h1", "checkpoint": "never"},
    {"schedule": "gpipe", "checkpoint": "always"},
    {"schedule": "1f1b", "backward": "code"},
]


def each_alone(out: Tensor, target: Tensor) -> Tensor:
    """A loss in a loop over samples."""
    return torch.stack([F.mse_loss(o.sort()[0], t) for o, t in zip(out, target, strict=True)]).mean()


def in_all(out: Tensor, target: Tensor) -> Tensor:
    loss = torch.zeros((), dtype=out.dtype)
    for o, t in zip(out, target, strict=True):
        loss = loss + (o - t).abs().sum() / len(out)
    return loss


STEPS = list(product([each_alone, in_all], WAYS))


@pytest.mark.parametrize(
    ("loss", "options"),
    mostly_slow(STEPS, STEPS[::3].__contains__),
    ids=lambda value: value.__name__ if callable(value) else "-".join(value.values()),
)
def test_steps_are_the_models(loss: Callable[..., Tensor], options: dict[str, Any]) -> None:
    model = Model(listed)
    plain = copy.deepcopy(model)
    x, target = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 3, 3, dtype=torch.float64)
    with closing(fxpipe.compile(model, 2, 3, **options)) as pipe:
        for _ in range(2):
            expected = loss(plain(x), target)
            expected.backward()
            torch.testing.assert_close(pipe.step(x, target=target, loss_fn=loss), expected.detach())
            same_gradients(model, plain)


def by_number(self: Any, x: Tensor, h: Tensor) -> Tensor:
    """Samples are counted by a plain number."""
    return self.second(h).reshape(3 * rows_of(x), 8).view(rows_of(x), 3, 8)


@pytest.mark.parametrize("backward", ["code", "autograd"])
@pytest.mark.parametrize("body", [in_two, by_number], ids=named)
@pytest.mark.filterwarnings("ignore:.* keep autograd")
def test_replicas_take_slices_of_micro_batches_of_one_size(body: Body, backward: str) -> None:
    model = Model(body)
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"replicas": (1, 2), "backward": backward}
    with closing(fxpipe.compile(model, 3, 2, **options)) as pipe:
        for rows in (8, 12):
            x, target = inputs(rows)[0], torch.ones(rows, 3, 3, dtype=torch.float64)
            expected = F.mse_loss(plain(x), target)
            expected.backward()
            torch.testing.assert_close(pipe.step(x, target=target, loss_fn=F.mse_loss), expected.detach())
            same_gradients(model, plain)


def test_each_sample_drops_elements_of_its_own() -> None:
    def body(self: Any, x: Tensor, h: Tensor) -> Tensor:
        return torch.stack([F.dropout(torch.ones_like(one), 0.5) for one in h])

    with closing(fxpipe.compile(Model(body), 1, 2)) as pipe:
        rows = pipe.model.last.weight.shape[0]
        found = pipe(torch.randn(8, 6, dtype=torch.float64))
    assert found.shape == (8, 3, rows)
    assert len(found.detach().flatten(1).unique(dim=0)) == 8


ROWS = {
    "relu": lambda self, one: self.second(one).relu(),
    "norm": lambda self, one: self.norm(one) + one,
    "rows": lambda self, one: one - one.mean(0),
    "turned": lambda self, one: one.flip(0) * one.std(),
    "mixed": lambda self, one: (one @ one.t()).softmax(-1) @ one,
    "max": lambda self, one: one * one.max(0)[0],
}


@pytest.mark.slow
@settings(max_examples=8)
@given(
    st.lists(st.lists(st.sampled_from(sorted(ROWS)), min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(2, 4),
    st.integers(4, 9),
)
def test_random_loops(loops: list[list[str]], chunks: int, samples: int) -> None:
    """Loops after one another, each of some ops, of which the last take the lists of all before."""

    def body(self: Any, x: Tensor, h: Tensor) -> Tensor:
        lists: list[list[Tensor]] = []
        for ops in loops:
            made = list(h)
            for name in ops:
                made = [ROWS[name](self, one) for one in made]
            lists.append(made)
            h = torch.stack(made) * 0.5 + h
        return torch.stack([sum(each) for each in zip(*lists, strict=True)]) + h  # type: ignore[arg-type]

    check(Model(body), chunks, samples)


# Numbers that are made of the batch size ------------------------------------------------------------------------------


def rows_of(x: Tensor) -> int:
    """The batch size as a plain number."""
    return len(range(x.shape[0]))


def test_numbers_that_are_made_of_the_batch_size_are_those_of_each_micro_batch() -> None:
    def body(self: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return h.square().sum() / rows_of(x), self.second(h).reshape(2 * rows_of(x), 12).view(rows_of(x), 24)

    check(Model(body), 3, 8)
    made = capture(Model(body), (torch.randn(4, 6, dtype=torch.float64),))
    assert "truediv(sum_1, b)" in str(made)
    assert made.conditions == ("b == 4",)


def test_samples_that_are_scaled_by_their_number_are_told() -> None:
    with (
        closing(fxpipe.compile(Model(lambda self, x, h: h * rows_of(x)), 2, 2)) as pipe,
        pytest.warns(MixedSamplesWarning, match="computes with the batch size"),
    ):
        pipe(torch.randn(6, 6, dtype=torch.float64))


@pytest.mark.parametrize("power", [-1, 0.5])
def test_what_is_no_linear_function_of_the_batch_size_is_refused(power: float) -> None:
    model = Model(lambda self, x, h: h.sum() * rows_of(x) ** power)
    with (
        closing(fxpipe.compile(model, 2, 2)) as pipe,
        pytest.raises(CaptureError, match=r"(?s)sample_loops.py:\d+.*which is made of the batch size"),
    ):
        pipe(torch.randn(6, 6, dtype=torch.float64))


def by_length(self: Any, x: Tensor, h: Tensor) -> Tensor:
    h = torch.stack([self.second(one) for one in h])
    return h * 2 if len(x) > 9 else h


def by_count(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return h * 2 if rows_of(x) > 9 else h


def by_last_index(self: Any, x: Tensor, h: Tensor) -> Tensor:
    return h * 2 if list(range(len(x)))[-1] > 8 else h


@pytest.mark.parametrize("chunks", mostly_slow([2, 5], (2).__eq__))
@pytest.mark.parametrize("body", [by_length, by_count, by_last_index])
def test_what_is_done_for_the_whole_batch_only_is_refused(body: Any, chunks: int) -> None:
    x = torch.randn(12, 6, dtype=torch.float64)
    with (
        closing(fxpipe.compile(Model(body), 2, chunks)) as pipe,
        pytest.raises(CaptureError, match=r"(?s)sample_loops.py:\d+\n    return h \* 2 if .*runs other ops"),
    ):
        pipe(x)
    with closing(fxpipe.compile(Model(body), 2, 1)) as pipe:
        torch.testing.assert_close(pipe(x), pipe.model(x))
    with closing(fxpipe.compile(Model(body), 2, chunks)) as pipe:
        torch.testing.assert_close(pipe(x[:8]), pipe.model(x[:8]))


class Labelled(nn.Module):
    """Goes through its samples one by one, so that its graphs are for one number of them, and for any length."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = torch.stack([self.body(one).tanh() for one in self.words(ids)])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("chunks", mostly_slow([1, 2], (2).__eq__))
def test_other_sizes_are_compared_where_the_batch_size_is_fixed(chunks: int) -> None:
    model = Labelled().double()
    with closing(fxpipe.compile(copy.deepcopy(model), 2, chunks)) as pipe:
        for length in (7, 5):
            ids, labels = torch.randint(10, (4, length)), torch.randint(10, (4, length))
            torch.testing.assert_close(pipe.step(ids, labels), model(ids, labels).detach())
        assert pipe.build.program.stages[-1].backward is not None
        with pytest.raises(ValueError, match="batch_size"):
            pipe.step(ids[:, :3], labels)
