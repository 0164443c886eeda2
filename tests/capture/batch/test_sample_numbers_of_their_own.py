"""Loops over samples in which each has numbers of its own: lengths, places, counts. Right in every number of
micro-batches, or refused with the line."""

from __future__ import annotations

import copy
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
from fxpipe.errors import CaptureError
from tests.capture.batch.test_sample_loops import check
from tests.capture.batch.test_selected_rows import named, same_gradients
from tests.helpers.marks import mostly_slow

Body = Callable[[Any, Tensor, Tensor], Any]
LOOPS: list[Body] = []
KEPT_WHOLE: list[Body] = []
LONGEST = 5


class Model(nn.Module):
    """What `body` makes of h, f64[b, 5, 8], and lengths i64[b], 1 to 5, between two layers."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.active, self.body = nn.ReLU(inplace=True), body
        self.double()

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        made = self.body(self, self.first(x), lengths)
        return self.last(made) if made.dim() > 1 else made


def batch(samples: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, LONGEST, 6, dtype=torch.float64, generator=random)
    return x, torch.randint(1, LONGEST + 1, (samples,), generator=random)


def loop(body: Body) -> Body:
    LOOPS.append(body)
    return body


def kept_whole(body: Body) -> Body:
    KEPT_WHOLE.append(body)
    return body


@loop
def pooled(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    return torch.stack([one[:n].mean(0) for one, n in zip(h, lengths.tolist(), strict=True)])


@loop
def last_step(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    return torch.stack([one[n - 1] for one, n in zip(h, lengths.tolist(), strict=True)])


@loop
def by_index(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    made = []
    for i in range(len(h)):
        made.append(h[i, : int(lengths[i])].sum(0))
    return torch.stack(made)


@loop
def from_the_end(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    return torch.stack([one[-n.item() :].sum(0) / n for one, n in zip(h, lengths, strict=True)])


@loop
def between(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    """Two lists of numbers, in two loops."""
    starts = [n // 2 for n in lengths.tolist()]
    parts = [one[a:n] for one, a, n in zip(h, starts, lengths.tolist(), strict=True)]
    return torch.stack([self.second(part).relu().max(0)[0] for part in parts])


@loop
def attends(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    each = zip(h, lengths.tolist(), strict=True)
    return torch.stack([((x[:n] @ x.t()).softmax(-1) @ x).mean(0) for x, n in each])


@loop
def in_place(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    each = zip(h, lengths.tolist(), strict=True)
    return torch.stack([self.active(self.second(one[:n])).sum(0, keepdim=True) for one, n in each])


@loop
def lists(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    """Ops that take several values of a sample in a list."""
    each = zip(h, lengths.tolist(), strict=True)
    parts = [torch.cat([self.second(one[:n]).sum(0, keepdim=True), one[1:]], dim=0) for one, n in each]
    return torch.stack(parts) + h


@loop
def joined_twice(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    """Joins are copies: what is written into one of them is not in the others, nor in the samples."""
    each = [one[:n].sum(0) + one for one, n in zip(h, lengths.tolist(), strict=True)]
    one, two, three = torch.stack(each), torch.stack(each), torch.stack([*h])
    two += 1
    three *= 2
    return one * two + h.tanh() * three


@loop
def padded(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat(
        [F.pad(one[:n], (0, 0, 0, 5 - n)).view(1, 5, 8) for one, n in zip(h, lengths.tolist(), strict=True)]
    )


@loop
def made_of_numbers(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    steps = torch.arange(5)
    return torch.stack(
        [(one * (steps < n).unsqueeze(1)).sum(0) / max(n, 1) for one, n in zip(h, lengths.tolist(), strict=True)]
    )


@loop
def selected(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    """No numbers, and sizes that data decides."""
    return torch.stack([self.second(one[one[:, 0] > 0]).sum(0) for one in h])


@loop
def scaled(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    """A number that is no whole one, and of the values that the model computes."""
    return torch.stack([self.second(one) * one.detach()[0, 0].item() for one in h])


@loop
def added_up(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    total = h.new_zeros(())
    for one, n in zip(h, lengths.tolist(), strict=True):
        total = total + self.second(one[:n]).square().mean()
    return total


@kept_whole
def branches(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    return torch.stack([one[:n].sum(0) if n > 2 else one[0] for one, n in zip(h, lengths.tolist(), strict=True)])


@kept_whole
def of_the_one_before(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    numbers = lengths.tolist()
    return torch.stack([one[:n].sum(0) for one, n in zip(h, [5, *numbers[:-1]], strict=True)])


@kept_whole
def counts_up(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    total, made = 0, []
    for one, n in zip(h, lengths.tolist(), strict=True):
        total += n
        made.append(one[:n].sum(0) * total)
    return torch.stack(made)


@loop
def in_one_number(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    """The number of the batch's first sample, for all samples: this is no loop, and known before anything runs."""
    return h[:, : lengths[0].item()].sum(1)


def written(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.zeros_like(h)
    for i, n in enumerate(lengths.tolist()):
        mask[i, :n] = 1
    return h * mask


@pytest.mark.parametrize("body", mostly_slow(LOOPS, [by_index, last_step, scaled].__contains__), ids=named)
def test_a_loop_is_the_models(body: Body) -> None:
    """In micro-batches of 3 and 2 samples; and then of as many, and more."""
    check(Model(body), 3, 8, batch)


@pytest.mark.parametrize("body", mostly_slow(LOOPS, [by_index].__contains__), ids=named)
def test_micro_batches_of_one_sample(body: Body) -> None:
    check(Model(body), 4, 7, batch)


@pytest.mark.parametrize("body", mostly_slow([*LOOPS, *KEPT_WHOLE, written], [by_index].__contains__), ids=named)
@pytest.mark.filterwarnings("ignore:.* kept whole")
def test_uncut_it_is_the_models(body: Body) -> None:
    plain, model, given = Model(body), Model(body), batch(4)
    with closing(fxpipe.compile(model, 2, 1)) as pipe:
        expected, found = plain(*given), pipe(*given)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        for made in (expected, found):
            made.square().sum().backward()
        same_gradients(model, plain)


@pytest.mark.parametrize("body", KEPT_WHOLE, ids=named)
def test_what_is_no_loop_is_kept_whole(body: Body) -> None:
    """Samples are not treated alike, or one has the number of another."""
    with closing(fxpipe.compile(Model(body), 2, 2)) as pipe, pytest.warns(UserWarning, match=r"their_own.py:\d+"):
        pipe(*batch(6))


def test_what_writes_into_all_samples_is_refused_with_its_line() -> None:
    with closing(fxpipe.compile(Model(written), 2, 2)) as pipe, pytest.raises(CaptureError, match=r"their_own.py:\d+"):
        pipe(*batch(6))


WAYS: list[dict[str, Any]] = [
    {"schedule": "1f1b"},
    {"schedule": "zb-h1", "checkpoint": "never"},
    {"schedule": "gpipe", "checkpoint": "always"},
    {"schedule": "1f1b", "backward": "code"},
    {"schedule": "interleaved", "chunks": 2},
]


STEPS = list(product([between, in_place], WAYS))


@pytest.mark.parametrize(
    ("body", "options"),
    mostly_slow(STEPS, STEPS[3::6].__contains__),
    ids=lambda value: named(value) if callable(value) else "-".join(map(str, value.values())),
)
def test_steps_are_the_models(body: Body, options: dict[str, Any]) -> None:
    model, options = Model(body), {"chunks": 3, **options}
    plain = copy.deepcopy(model)
    given = batch(8)
    with closing(fxpipe.compile(model, 2, **options)) as pipe:
        for _ in range(2):
            expected = plain(*given).square().mean()
            expected.backward()
            found = pipe.step(*given, loss_fn=lambda out: out.square().mean())
            torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
            same_gradients(model, plain)


def test_generated_backward_says_why_it_leaves_a_loop_to_autograd() -> None:
    with closing(fxpipe.compile(Model(pooled), 2, 2, backward="code")) as pipe:
        pipe.step(*batch(6), loss_fn=lambda out: out.square().mean())
        assert "a loop over samples, which have numbers of their own" in str(pipe.explain())


OPS: dict[str, Callable[[Any, Tensor, int], Tensor]] = {
    "layer": lambda self, one, n: self.second(one),
    "first": lambda self, one, n: one[:n].sum(0) + one,
    "step": lambda self, one, n: one * one[n - 1],
    "over": lambda self, one, n: one / n,
    "times": lambda self, one, n: (n + 1) * one.tanh(),
}


@pytest.mark.slow
@settings(max_examples=6)
@given(
    st.lists(st.lists(st.sampled_from(sorted(OPS)), min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(2, 4),
    st.integers(4, 9),
)
def test_random_loops(loops: list[list[str]], chunks: int, samples: int) -> None:
    """Loops after one another, each of some ops with the sample's number, between ops of the whole batch."""

    def body(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
        for ops in loops:
            made = []
            for one, n in zip(h, lengths.tolist(), strict=True):
                for name in ops:
                    one = OPS[name](self, one, n)
                made.append(one)
            h = torch.stack(made) * 0.5 + h
        return h

    check(Model(body), chunks, samples, batch)


@pytest.mark.slow
def test_pieces_of_selected_rows_are_right_in_one_micro_batch_and_else_refused_with_their_line() -> None:
    def pieces(self: Any, h: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(LONGEST) < lengths[:, None]
        chosen = h[mask]
        return torch.cat([one.cumsum(0) for one in chosen.split(lengths.tolist())])

    x, lengths = batch(6)
    model = Model(pieces)
    with closing(fxpipe.compile(model, devices=2, chunks=1)) as pipe:
        torch.testing.assert_close(pipe(x, lengths), model(x, lengths))
    with closing(fxpipe.compile(model, devices=2, chunks=2)) as pipe:
        with pytest.raises(CaptureError, match=r"(?s)test_sample_numbers_of_their_own.py:\d+.*chosen\.split"):
            pipe(x, lengths)
