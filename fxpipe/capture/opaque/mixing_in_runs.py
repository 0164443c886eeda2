"""Whether a submodule that is kept whole mixes the samples of a batch: two runs tell, as its code is not traced.

    run 1    samples    1 2 3 4
    run 2    samples    4 3 5 6 7        3 and 4 have other neighbours and another place, and the whole another mean

A sample of both has the same values in both. Where a result has others for it, it was computed from other samples, too,
or from its place among them, as a position that counts the images of the samples before.
Nothing is said of a call that draws random numbers or writes buffers (batch norm's statistics are those of each
micro-batch), or that is given other values for a sample already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fxpipe.errors import InputError
from fxpipe.ir.graph.opaque_call import Gives, Opaque, Promise


@dataclass(frozen=True)
class Contents:
    """Copies of the tensors that a call was given and returned, which later writes do not change. A returned list whose
    length only a run shows is one item: the sequence of its tensors."""

    given: Sequence[Tensor]
    returned: Sequence[Tensor | Sequence[Tensor]]


def in_another_order(rows: int, of: int) -> list[int]:
    """Samples of the second run, one more than the `rows` of the first: the later half of these, each with others
    before and behind it, and then samples that were not there, so that a largest value is mostly another one; the
    earlier half if there are no others.

    >>> in_another_order(4, of=9), in_another_order(4, of=4), in_another_order(1, of=9)
    ([3, 2, 4, 5, 6], [3, 2, 0, 1, 0], [1, 0, 2])
    """
    if rows == 1:
        return [1 % of, 0, 2 % of]
    return [*reversed(range(rows // 2, rows)), *range(rows, of), *range(rows // 2), 0][: rows + 1]


def mixing(one: Contents, two: Contents, rows: int, samples: Sequence[int]) -> frozenset[int] | None:
    """Which results of two calls have other values for the same samples: 0 to `rows` in the first, `samples` in the
    second. None if nothing can be said, as the calls were given other values."""
    if not all(_alike(*pair, rows, samples) for pair in zip(one.given, two.given, strict=True)):
        return None
    returned = [
        _alike(a, b, rows, samples)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else _items_alike([*a], [*b], rows, samples)
        for a, b in zip(one.returned, two.returned, strict=True)
    ]
    return frozenset(at for at, same in enumerate(returned) if not same)


def check_supposed(lists: Sequence[str], rows: int, opaque: Opaque, promise: Promise) -> None:
    """Raise InputError if a call that looks into lists of as many items as samples is not seen to make each sample's
    result of its own item: they may be anything else. A result without samples needs the whole batch, so all items."""
    shapes = [one.shape for one in promise.gives if isinstance(one, Gives)]
    of_samples = any(not isinstance(size, int) for shape in shapes for size in shape)
    if lists and promise.lists and promise.mixing != frozenset() and of_samples:
        raise InputError(
            f"{' and '.join(lists)} may have an item for each sample, or something else: {opaque}, which looks into "
            f"lists of {rows} items for {rows} samples, is not seen to make each sample's result of its own item; "
            f"write batch_dim={dict.fromkeys(lists)} to give a list whole to every micro-batch, or 'items' for a list "
            "whose items are the samples"
        )


def _alike(one: Tensor, two: Tensor, rows: int, samples: Sequence[int]) -> bool:
    """Whether two tensors have the same values for the same samples, up to rounding; True for what has no rows of
    samples. How a result without them may be used is known from its type."""
    if any(type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided for x in (one, two)):
        return True
    dims = [dim for dim, size in enumerate(one.shape) if size != two.shape[dim]]
    if len(dims) != 1:
        return True
    size, larger, of = one.shape[dims[0]], two.shape[dims[0]], len(samples)
    each = size // rows
    if not each or (size, larger) != (each * rows, each * of):
        return True
    both = [sample for sample in range(rows) if sample in samples]
    places = torch.tensor(both), torch.tensor([samples.index(sample) for sample in both])

    def of_both(x: Tensor, count: int, at: Tensor, together: bool) -> Tensor:
        """The rows of samples: all of a sample, then all of the next; or the first of each, then the second of each."""
        numbers = torch.arange(count * each)
        found = numbers.reshape(count, each)[at] if together else numbers.reshape(each, count)[:, at]
        return x.index_select(dims[0], found.flatten().to(x.device))

    return any(
        _close(of_both(one, rows, places[0], together), of_both(two, of, places[1], together))
        for together in (True, False)
    )


def _items_alike(one: Sequence[Tensor], two: Sequence[Tensor], rows: int, samples: Sequence[int]) -> bool:
    """Whether two lists have alike items for the same samples; True if each sample has not as many items."""
    each = len(one) // rows
    if (len(one), len(two)) != (each * rows, each * len(samples)):
        return True
    both = [(sample, samples.index(sample)) for sample in range(rows) if sample in samples]
    pairs = [(one[a * each + item], two[b * each + item]) for a, b in both for item in range(each)]
    return all(a.shape == b.shape and _close(a, b) for a, b in pairs)


def _close(one: Tensor, two: Tensor) -> bool:
    """Whether they are equal; for floats, up to what another order of sums changes, measured by the largest value."""
    if not one.numel() or not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, two)
    bound = torch.finfo(one.dtype).eps ** 0.5
    one, two = (x if x.is_complex() else x.double() for x in (one, two))
    largest = one.abs().nan_to_num(posinf=0).amax().item()
    return torch.allclose(one, two, rtol=0, atol=bound * largest, equal_nan=True)
