"""Checksums of arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxpipe.engines.ranks.input_checksums import _of_few, _of_many, checksum, differing

TYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def number(tensor: Tensor) -> int:
    found = checksum(tensor)
    assert found is not None
    return int(found)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5), (70, 9)], ids=str)
def test_numpy_finds_the_same_number(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Another rank may have the same values on an accelerator."""
    bits = torch.randint(-128, 128, (*shape, dtype.itemsize), dtype=torch.int8)
    x = bits.view(dtype) if dtype is not torch.bool else bits > 0
    flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)
    assert _of_few(flat) == int(_of_many(flat))
    assert _of_few(flat[1:]) == int(_of_many(flat[1:])) == number(flat[1:])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5), (9001, 2)], ids=str)
def test_all_bits_count(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.arange(torch.Size(shape).numel()).remainder(50).view(shape).to(dtype)
    assert number(x) == number(x.clone()) == number(torch.stack([x, x], -1)[..., 0])  # with strides
    flat = x.reshape(-1)
    if x.numel():
        assert number(flat) == number(torch.cat([flat[:1], flat])[1:])  # in memory that begins elsewhere
        changed = x.clone()
        changed.view(-1)[-1] = not changed.view(-1)[-1] if dtype is torch.bool else 77
        assert number(changed) != number(x)


def test_the_order_counts() -> None:
    """Labels are small numbers: of a thousand shuffled batches, no two agree by chance."""
    torch.manual_seed(0)
    labels = torch.randint(10, (64,))
    assert len({number(labels[torch.randperm(64)]) for _ in range(1000)}) == 1000
    for rows in (2, 600, 10_000):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            x = torch.randn(rows, 4, dtype=dtype)
            assert number(-x) != number(x)
    flags = torch.arange(7) < 3
    assert len({number(flags.roll(by)) for by in range(7)}) == 7
    images = torch.randn(600, 3, 5)
    assert len({number(images[torch.randperm(600)]) for _ in range(100)}) == 100


def test_what_has_no_bits_to_read() -> None:
    assert checksum(torch.empty(3, device="meta")) is None
    assert checksum(torch.eye(3).to_sparse()) is None
    assert number(torch.ones(3, requires_grad=True)) == number(torch.ones(3))
    z = torch.complex(torch.ones(2), torch.ones(2))
    assert number(z.conj()) == number(z.conj().resolve_conj()) != number(z)


def test_each_argument_and_rank_is_named() -> None:
    found = differing({2: {"x": 1, "mask": 4}, 0: {"x": 1, "target": 3}, 1: {"x": 2}, 3: {"mask": 5, "target": 3}})
    assert found is not None
    assert found.startswith(
        "x has other values on rank 1 than on rank 0; mask has other values on rank 3 than on rank 2: "
    )
    assert differing({0: {"x": 1}, 1: {}, 2: {"x": 1, "y": 2}}) is None
