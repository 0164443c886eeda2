"""Numbers of tensors that are made of Python's numbers are constants, and values of inputs are known; those of what is
made of parameters are not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import capture
from fxpipe.ir.graph.opaque_call import opaques
from tests.helpers import asserting
from tests.helpers.marks import mostly_slow


class Of(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(self.fc(x)))


def axes(x: Tensor) -> Tensor:
    return x.softmax(1) / x.sum((torch.arange(1, x.dim(), device=x.device) + 0).tolist(), keepdim=True)


def item(x: Tensor) -> Tensor:
    return x * torch.tensor(0.5, dtype=torch.float64).item() + x[..., : int(torch.full((), 4).item())]


def nested(x: Tensor) -> Tensor:
    (a, b), (c, d) = torch.eye(2).tolist()
    return x * a + x * b - x * c * d


def written(x: Tensor) -> Tensor:
    numbers = torch.arange(4)
    numbers += 1
    return x * numbers.tolist()[0]


def written_by_a_view(x: Tensor) -> Tensor:
    numbers = torch.arange(4)
    numbers[:2].add_(3)
    return x * numbers.tolist()[0]


def of_data(x: Tensor) -> Tensor:
    return x * torch.arange(int(x.abs().sum().item()) + 2).tolist()[1]


def written_with_data(x: Tensor) -> Tensor:
    numbers = torch.zeros(4)
    numbers[1:] = x.detach().flatten()[:3].round()
    return x * numbers.tolist()[2]


@pytest.mark.parametrize("body", [axes, item, nested, written, written_by_a_view], ids=lambda body: body.__name__)
def test_constants_are_folded(body: Callable[[Tensor], Tensor]) -> None:
    model, x = Of(body), torch.randn(6, 3, 4)
    assert not opaques(capture(model, (x,)))
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    torch.testing.assert_close(pipe(x), model(x))
    pipe.close()


@pytest.mark.filterwarnings("ignore:.*is kept whole")
@pytest.mark.parametrize("body", [of_data, written_with_data], ids=lambda body: body.__name__)
def test_what_depends_on_data_is_not(body: Callable[[Tensor], Tensor]) -> None:
    model, x = nn.Sequential(Of(body), nn.Linear(4, 4)), torch.randn(6, 4)
    pipe = fxpipe.compile(model, devices=2, chunks=1)
    torch.testing.assert_close(pipe(x), model(x))
    pipe.close()


def dice(output: Tensor, target: Tensor, batch: bool = False) -> Tensor:
    over = torch.arange(2, output.dim()).tolist()
    over = [0, *over] if batch else over
    p = output.softmax(1)
    return (1 - (2 * (p * target).sum(over) + 1) / (p.sum(over) + target.sum(over) + 1)).mean()


def test_a_loss_that_sums_over_all_axes_of_an_image() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    x = torch.randn(4, 1, 6, 6)
    y = nn.functional.one_hot(torch.randint(3, (4, 6, 6)), 3).movedim(-1, 1).float()
    pipe = fxpipe.compile(net, devices=2, chunks=2, schedule="1f1b")
    torch.testing.assert_close(pipe.step(x, target=y, loss_fn=dice), dice(net(x), y).detach())
    pipe.close()


# Values of inputs -----------------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Two layers over embedded tokens, with what `look` does to their result or the inputs."""

    def __init__(self, look: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.look, self.embed = look, nn.Embedding(20, 8, dtype=torch.float64)
        self.first, self.second, self.head = (nn.Linear(8, n, dtype=torch.float64) for n in (8, 8, 20))
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor, extra: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.embed(ids)))
        x = self.look(self, x, labels, extra)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        scores = self.head(x)
        return F.cross_entropy(scores.flatten(0, 1), labels[:, : scores.shape[1]].flatten())


def checked(self: Tokens, x: Tensor, labels: Tensor, extra: Tensor) -> Tensor:
    if labels.max() >= 20 or not labels.min() >= 0:
        raise ValueError(f"labels are from 0 to 19, not {labels.max()}")
    return x


def short_cut(self: Tokens, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return x if bool(mask.all()) else x * mask[..., None]


def marked(self: Tokens, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    any_marked = (mask == 0).flatten().any().item()
    return x + self.second(x * (mask == 0)[..., None]) if any_marked else x


def either(self: Tokens, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    both = mask.all() or (labels > 3).any()  # a tensor, whichever it is
    return x * torch.where(both, 2.0, 0.5)


def while_there_are(self: Tokens, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    left = mask.sum(1).min()
    while left > 3:
        x, left = self.second(x), left - 1
    return x


def longest(self: Tokens, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return x[:, : int(mask.sum(1).max().item())]


def counted(self: Tokens, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    ones, *_ = F.one_hot(labels, 20).sum((0, 1))[1:].tolist()
    return x * ones


def written_before(self: Tokens, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[:, 0] = 0
    return x if mask.all() else x * mask[..., None]


def written_between(self: Tokens, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """A value that is read before a write, and another one after it, also through a view."""
    shifted = labels.new_zeros(labels.shape)
    row = shifted[:, 1:]
    before = int(shifted.max().item())
    row.copy_(labels[:, :-1]).clamp_(max=7)
    return x * (before + int(shifted.max().item())) if (shifted[:, 1:] == row).all() else x


def read_by_ops(self: Tokens, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Tensors of which torch reads the numbers inside of ops."""
    shortest = mask.sum(1).long().min()
    x, rest = x.split([shortest, mask.shape[1] - shortest], 1)
    halves = x.reshape(x.shape[0], shortest, 2, 4) + rest.sum((1, 2))[:, None, None, None]
    return halves.flatten(2) * torch.arange(shortest)[:, None] * torch.ones(shortest, 1, dtype=x.dtype)


LOOKS = [
    checked, short_cut, marked, either, while_there_are, longest, counted, written_before, written_between, read_by_ops,
]  # fmt: skip
IDS = torch.randint(1, 20, (8, 6), generator=torch.Generator().manual_seed(1))
ONES = torch.ones(8, 6, dtype=torch.float64)
HOLES = ONES.clone()
HOLES[6, 4:] = 0  # in the last micro-batch


def check(model: Tokens, pipe: fxpipe.Pipe, *args: Tensor) -> None:
    """A step has the loss and all gradients of the plain model."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss = plain(*args)
    loss.backward()
    model.zero_grad()
    torch.testing.assert_close(pipe.step(*args), loss.detach())
    for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
        zero = torch.zeros_like(two)
        torch.testing.assert_close(*(zero if p.grad is None else p.grad for p in (one, two)), msg=name)


WAYS: dict[str, dict[str, Any]] = {
    "1": {"chunks": 1},
    "2": {"chunks": 2},
    "uneven": {"chunks": 3, "schedule": "gpipe", "checkpoint": "always"},
    "code": {"chunks": 4, "schedule": "zb-h1", "backward": "code"},
}


QUICK = [("2", checked), ("2", marked), ("2", counted), ("2", written_before), ("code", longest)]


@pytest.mark.parametrize(
    ("way", "look"),
    mostly_slow(product(WAYS, LOOKS), QUICK.__contains__),
    ids=lambda part: getattr(part, "__name__", part),
)
def test_values_of_inputs_are_known(way: str, look: Callable[..., Tensor]) -> None:
    model = Tokens(look)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe = fxpipe.compile(model, devices=2, **WAYS[way])
        for mask in (ONES, HOLES, HOLES, ONES):
            check(model, pipe, IDS, IDS, mask)
    assert len(pipe.stages) == 2
    pipe.close()


def test_calls_whose_values_lead_the_same_way_are_of_one_kind(caplog: pytest.LogCaptureFixture) -> None:
    model = Tokens(short_cut)
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    more = HOLES.clone()
    more[0, 3:] = 0
    with caplog.at_level("INFO", "fxpipe"):
        for mask in (ONES, HOLES, more, ONES, HOLES):
            check(model, pipe, IDS, IDS, mask)
    assert sum("capturing" in record.message for record in caplog.records) == 2
    pipe.close()


def test_the_models_exception_is_raised_with_the_real_values() -> None:
    model, wrong = Tokens(checked), IDS.clone()
    wrong[7, 2] = 25  # in the last micro-batch
    pipe = fxpipe.compile(model, devices=2, chunks=4)
    for _ in range(2):
        with pytest.raises(ValueError, match="labels are from 0 to 19, not 25"):
            pipe.step(IDS, wrong, ONES)
        check(model, pipe, IDS, IDS, ONES)
    pipe.close()


ASSERTING = (asserting.about_labels, asserting.about_the_batch, asserting.by_a_check, asserting.behind_a_write)
QUICK_ASSERTING = [(asserting.about_labels, 3), (asserting.by_a_check, 1), (asserting.behind_a_write, 3)]


@pytest.mark.parametrize(
    ("look", "chunks"),
    mostly_slow(product(ASSERTING, [1, 3]), QUICK_ASSERTING.__contains__),
    ids=lambda part: getattr(part, "__name__", part),
)
def test_assertions_about_inputs_are_checked(look: Callable[..., Tensor], chunks: int) -> None:
    """Before and after a call in which they hold."""
    model, wrong = Tokens(look), IDS.clone()
    wrong[7, 2] = 25  # in the last micro-batch
    pipe = fxpipe.compile(model, devices=2, chunks=chunks)
    for _ in range(2):
        with pytest.raises((AssertionError, RuntimeError), match="labels are below 20"):
            pipe.step(IDS, wrong, ONES)
        check(model, pipe, IDS, IDS, ONES)
    pipe.close()


def test_assertions_in_layers_are_checked() -> None:
    """Which are captured once for all, if they assert nothing."""
    model, x, mask = asserting.Layers(), torch.randn(6, 4), torch.ones(6, 1)
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    torch.testing.assert_close(pipe(x, mask), model(x, mask))
    with pytest.raises(AssertionError, match="masks are positive"):
        pipe(x, mask - torch.eye(6)[:, 5:])
    pipe.close()


def test_an_assertion_about_what_parameters_have_made_is_said_not_to_be_checked() -> None:
    model = Tokens(asserting.about_numbers)
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            check(model, pipe, IDS, IDS, ONES)
    (said,) = (str(one.message) for one in told)
    assert 'assert (x == x).all(), "not a number"\nis not checked in a pipe' in said
    pipe.close()


def test_a_written_value_is_read_anew_in_each_call() -> None:
    """The copies are written, and never what the user has given."""
    model = Tokens(written_between)
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    for largest in (3, 5, 3):
        ids = IDS.clamp(max=largest)
        check(model, pipe, ids, ids, ONES)
        assert int(ids.max()) == largest
    pipe.close()


@pytest.mark.slow
def test_values_that_are_others_in_each_batch_are_read_sixteen_times() -> None:
    """From then on what reads them is kept whole."""

    class Shifted(Tokens):
        def forward(self, ids: Tensor) -> Tensor:
            return self.shift(self.first(self.embed(ids)), ids)

    class Shift(nn.Module):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return x.roll(int(ids.max().item()), 1) if ids.max() > 0 else x

    model = Shifted(checked)
    model.shift = Shift()
    pipe = fxpipe.compile(model, devices=2, chunks=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for largest in range(19):
            ids = torch.full((4, 7), largest)
            torch.testing.assert_close(pipe(ids), model(ids))
    assert sum("shift is kept whole" in str(one.message) for one in told) == 1
    pipe.close()
