"""Rows that are sorted by expert and put back mix no samples, and are exact; all else that is sorted is mixed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import capture
from tests.helpers.layer_behind import LayerBehind
from tests.helpers.marks import mostly_slow

EXPERTS, EACH, WIDTH = 3, 2, 8
X = torch.randn(6, 5, WIDTH, requires_grad=True)


class Router(nn.Module):
    """Experts for tokens of `x`, in float32: torch's grouped product, or one by a bias. `body` computes with `sorted`,
    the keys, positions, tokens, weights and ends of a dropless router."""

    def __init__(self, body: Callable[[Router, Tensor, Tensor, Tensor, Tensor], Tensor], sort: str = "sort") -> None:
        super().__init__()
        self.body, self.sort = body, sort
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.weights = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        probabilities, ids = self.gate(tokens).softmax(-1).topk(EACH, -1)
        keys, at = sort(self.sort, ids.reshape(-1))
        rows = tokens[at // EACH] * probabilities.reshape(-1)[at].unsqueeze(-1)
        made: Tensor = self.body(self, tokens, rows, keys, at)
        return made


def sort(how: str, ids: Tensor) -> tuple[Tensor, Tensor]:
    if how == "argsort":
        at = ids.argsort()
        return ids[at], at
    return torch.sort(ids, descending=how == "descending")


def of_each(model: Router, rows: Tensor, keys: Tensor) -> Tensor:
    """Ops on rows, one by one, and with what is the same for all."""
    left, right = F.layer_norm(rows, (WIDTH,)).chunk(2, -1)
    return torch.cat([left * right, F.silu(right)], -1) + model.bias[keys] @ model.weights[0]


def summed(x: Tensor) -> Tensor:
    return x.view(-1, EACH, WIDTH).sum(1)


def by_places(model: Router, tokens: Tensor, rows: Tensor, keys: Tensor, at: Tensor) -> Tensor:
    back = torch.empty_like(at)
    back[at] = torch.arange(at.shape[0])
    return tokens + summed(of_each(model, rows, keys)[back])


def by_sort(model: Router, tokens: Tensor, rows: Tensor, keys: Tensor, at: Tensor) -> Tensor:
    return tokens + summed(of_each(model, rows, keys).index_select(0, at.argsort()))


def by_assignment(model: Router, tokens: Tensor, rows: Tensor, keys: Tensor, at: Tensor) -> Tensor:
    out = torch.zeros_like(rows)
    out[at] = of_each(model, rows, keys)
    return tokens + summed(out)


def by_sums(model: Router, tokens: Tensor, rows: Tensor, keys: Tensor, at: Tensor) -> Tensor:
    return torch.zeros_like(tokens).index_add_(0, at // EACH, of_each(model, rows, keys))


def ends(keys: Tensor, bins: int = EXPERTS, high: int = EXPERTS - 1) -> Tensor:
    return torch.histc(keys.float(), bins, 0, high).cumsum(0, dtype=torch.int32)


def grouped(model: Router, rows: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows.bfloat16(), model.weights.bfloat16(), offs=ends).float()


def by_groups(model: Router, tokens: Tensor, rows: Tensor, keys: Tensor, at: Tensor) -> Tensor:
    return tokens + summed(grouped(model, rows, ends(keys))[at.argsort()])


def by_columns(rows: Tensor, at: Tensor) -> Tensor:
    out = rows.clone()
    out[at, 0] = rows[:, 0]
    return out


EXACT = [by_places, by_sort, by_assignment, by_sums, by_groups]
MIXES: dict[str, Callable[[Router, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "keys come out": lambda model, tokens, rows, keys, at: keys,
    "positions come out": lambda model, tokens, rows, keys, at: at,
    "rows come out": lambda model, tokens, rows, keys, at: of_each(model, rows, keys),
    "a row for each key and its neighbour": lambda model, tokens, rows, keys, at: (rows + rows.flip(0))[at.argsort()],
    "rows meet tokens": lambda model, tokens, rows, keys, at: (rows + tokens.repeat_interleave(EACH, 0))[at.argsort()],
    "rows in pairs": lambda model, tokens, rows, keys, at: tokens + summed(rows),
    "rows beside places": lambda model, tokens, rows, keys, at: (rows + at.unsqueeze(-1))[at.argsort()],
    "sorted once more": lambda model, tokens, rows, keys, at: rows[at],
    "tokens by places": lambda model, tokens, rows, keys, at: tokens.repeat_interleave(EACH, 0)[at.argsort()],
    "put where it is": lambda model, tokens, rows, keys, at: rows[at.argsort(descending=True)],
    "positions of half a token": lambda model, tokens, rows, keys, at: tokens[at // EACH // EACH][at.argsort()],
    "other ends": lambda model, tokens, rows, keys, at: grouped(model, rows, ends(keys, high=EXPERTS))[at.argsort()],
    "ends of rows": lambda model, tokens, rows, keys, at: grouped(
        model, rows, torch.histc(rows[:, 0], EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    )[at.argsort()],
    "numbers of tokens": lambda model, tokens, rows, keys, at: torch.arange(at.shape[0])[at][at.argsort()],
    "one column of rows": lambda model, tokens, rows, keys, at: by_columns(rows, at),
    "weights of all tokens": lambda model, tokens, rows, keys, at: F.grouped_mm(
        rows.bfloat16(), (model.weights * tokens.mean()).bfloat16(), offs=ends(keys)
    )[at.argsort()],
    "counts for ends": lambda model, tokens, rows, keys, at: grouped(
        model, rows, torch.histc(keys.float(), EXPERTS, 0, EXPERTS - 1).int()
    )[at.argsort()],
    "tokens by groups": lambda model, tokens, rows, keys, at: grouped(
        model, tokens.repeat_interleave(EACH, 0), ends(keys)
    ),
    "of each key in a vmap": lambda model, tokens, rows, keys, at: torch.vmap(lambda row: row * 2)(rows)[at.argsort()],
}


def gradients(model: nn.Module, made: Tensor) -> tuple[Tensor, ...]:
    of = [X, *model.parameters()]
    return torch.autograd.grad(made.square().sum(), of, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("sort", mostly_slow(["sort", "argsort"], "argsort".__eq__))
@pytest.mark.parametrize("body", EXACT, ids=lambda body: body.__name__)
def test_rows_that_are_put_back_are_exact(body: Callable[..., Tensor], sort: str) -> None:
    torch.manual_seed(0)
    model = Router(body, sort)
    pipe = fxpipe.compile(model, devices=2, chunks=3)
    expected = model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxpipe.MixedSamplesWarning)
        made = pipe(X)
    torch.testing.assert_close(made, expected)
    for grad, plain in zip(gradients(model, made), gradients(model, expected), strict=True):
        torch.testing.assert_close(grad, plain, rtol=1e-4, atol=1e-3 if body is not by_groups else 1)


@pytest.mark.parametrize("name", mostly_slow(MIXES, [*MIXES][::2].__contains__))
def test_what_meets_others_or_comes_out_sorted_is_mixed(name: str) -> None:
    assert capture(LayerBehind(Router(MIXES[name])), (X,)).mixed


def test_the_largest_first_is_mixed() -> None:
    assert capture(Router(by_places, "descending"), (X,)).mixed
