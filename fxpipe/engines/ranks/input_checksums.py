"""Finds out whether ranks that are given the same argument are given the same values, as all work on one batch.

    rank 0   x: 17  target: 5 ─┐
    rank 1   x: 17             ├─ in the message that ends the step: target differs on ranks 0 and 2
    rank 2          target: 6 ─┘

Data loaders that shuffle with different seeds would else give the inputs of one batch and the targets of another, and
the training would fail without an error. A checksum is computed on the tensor's device, and read when the step ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes; sums of int64 alone are fast
ROWS = 4096  # how many sums a checksum is made of
FACTOR = 0x5851F42D4C957F2D  # odd, with bits in all places

Checksums = Mapping[str, int]  # by argument
Unread = Mapping[str, Tensor | int]  # the same; what an accelerator computes is not waited for yet


def checksum(tensor: Tensor) -> Tensor | int | None:
    """A number that depends on all bits of the elements, and on their order: the tensor is cut into about 4096 rows,
    whose sums have factors as if drawn at random. On the tensor's device. None for tensors whose bits cannot be read,
    such as sparse ones and those of the meta device.

    >>> x = torch.arange(6.0)
    >>> [bool(checksum(x) == checksum(y)) for y in (x.clone(), x.flip(0), x + 1)]
    [True, False, False]
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    with torch.no_grad():
        plain = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).resolve_neg()
        if plain.is_quantized or plain.element_size() not in WORDS:
            return None
        flat = plain.detach().reshape(-1).contiguous()
        few = flat.device.type == "cpu" and flat.nbytes <= 8 * ROWS
        return (_of_few if few else _of_many)(flat)


def _of_many(flat: Tensor) -> Tensor:
    """The checksum of flat elements, on their device."""
    each = 8 // flat.element_size()
    if flat.storage_offset() % each:
        flat = flat.clone()
    whole = flat.numel() // each * each
    words, rest = flat[:whole].view(torch.int64), flat[whole:]
    width = -(-len(words) // ROWS) | 1  # odd, as in a sum each two changed signs of float64 cancel out
    even = len(words) // width * width
    sums = [words] if width == 1 else [words[:even].view(-1, width).sum(1), words[even:].sum().view(1)]
    if len(rest):
        sums.append(rest.view(WORDS[flat.element_size()]).long())
    rows = torch.cat(sums) if len(sums) > 1 else words
    known = factors_on_cpu if rows.device.type == "cpu" else factors
    return ((rows ^ (rows >> 31)) * known(len(rows), rows.device)).sum()


def _of_few(flat: Tensor) -> int:
    """The checksum of a few words in host memory: the same number, by numpy, whose calls take less time."""
    raw, size = flat.view(torch.uint8).numpy(), flat.element_size()
    whole = len(raw) // 8 * 8
    rows = raw[:whole].view(np.int64)
    if whole < len(raw):
        rest = raw[whole:].view(np.uint8 if size == 1 else f"i{size}")
        rows = np.concatenate([rows, rest.astype(np.int64)])
    return int(((rows ^ (rows >> 31)) * factors_on_cpu(len(rows), flat.device).numpy()).sum())


def factors(count: int, device: torch.device) -> Tensor:
    """The factors of so many rows."""
    numbers = torch.arange(1, count + 1, device=device) * FACTOR
    return (numbers ^ (numbers >> 31)) * FACTOR


# Batches of a few rows take as long as the number of operations. Memory of an accelerator belongs to streams, so is not
# kept from one call to the next.
factors_on_cpu = lru_cache(16)(factors)


def differing(given: Mapping[int, Checksums]) -> str | None:
    """The text of the error that an argument differs, from the checksums of each rank; None if none does.

    >>> differing({0: {"x": 17, "target": 5}, 1: {"x": 17}, 2: {"target": 6}}).partition(":")[0]
    'target has other values on rank 2 than on rank 0'
    """
    first: dict[str, tuple[int, int]] = {}
    odd: dict[str, list[int]] = {}
    for rank in sorted(given):
        for name, value in given[rank].items():
            if first.setdefault(name, (rank, value))[1] != value:
                odd.setdefault(name, []).append(rank)
    if not odd:
        return None
    told = [
        f"{name} has other values on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} than on rank "
        f"{first[name][0]}"
        for name, ranks in odd.items()
    ]
    return (
        f"{'; '.join(told)}: all ranks of a pipe work on one batch. Load it in the same order on each (with the same "
        "seed), or pass an argument only where stages use it, and None elsewhere. fxpipe.compile(..., "
        "check_inputs=False) does not compare."
    )
