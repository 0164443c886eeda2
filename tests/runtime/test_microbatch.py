"""Cut and put together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from fxpipe.runtime.microbatch import MicroBatch, gather, join, overlaps, scatter, split_sizes


@given(some.integers(0, 50), some.integers(1, 12))
def test_sizes_are_even_and_complete(size: int, chunks: int) -> None:
    sizes = split_sizes(size, chunks)
    assert sum(sizes) == size
    assert len(sizes) == max(1, min(size, chunks))
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    assert [len(x) for x in torch.tensor_split(torch.zeros(size), len(sizes))] == list(sizes)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_undoes_scatter(dim: int) -> None:
    x = torch.arange(30).view(5, 6)
    sizes = split_sizes(x.shape[dim], 4)
    assert torch.equal(gather(scatter(x, dim, sizes), dim, None, sizes), x)


def test_whole_values_are_the_same_for_all() -> None:
    mask = torch.ones(3)
    assert all(piece is mask for piece in scatter(mask, None, (2, 1)))


def test_reductions() -> None:
    losses, sizes = [torch.tensor(1.0), torch.tensor(4.0)], (3, 1)
    assert gather(losses, None, "mean", sizes).item() == 1.75
    assert gather(losses, None, "sum", sizes).item() == 5
    assert gather(losses, None, "same", sizes) is losses[0]
    assert gather([2, 3], None, "sum", sizes) == 5
    with pytest.raises(ValueError, match="2 micro-batches become one: reduce is None"):
        gather([2, 3], None, None, sizes)


def test_a_value_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="no 'skip'"):
        MicroBatch().skip  # noqa: B018


@given(some.integers(0, 30), some.integers(1, 6), some.integers(1, 6))
def test_overlaps_are_where_both_have_the_sample(size: int, here: int, there: int) -> None:
    cuts = split_sizes(size, here), split_sizes(size, there)
    owners = [[k for k, rows in enumerate(sizes) for _ in range(rows)] for sizes in cuts]
    pieces = list(overlaps(*cuts))
    assert [(a, b) for a, b, rows in pieces for _ in range(rows)] == list(zip(*owners, strict=True))
    assert len({(a, b) for a, b, _ in pieces}) == len(pieces)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
def test_pieces_are_joined_in_the_memory_order_they_have(dim: int, order: tuple[int, int, int]) -> None:
    x = torch.arange(120).view(4, 5, 6).permute(order)
    whole = join([piece.clone() for piece in x.split([1, x.shape[dim] - 1], dim)][::-1], dim)
    assert torch.equal(whole.roll(1, dim), x)
    assert whole.stride() == x.stride()
