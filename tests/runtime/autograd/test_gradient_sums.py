"""Gradients are added in place, and a product of matrices as its sum."""

from __future__ import annotations

import torch

from fxpipe.runtime import accumulate, accumulate_mm


def test_the_first_gradient_is_the_sum() -> None:
    gradient = torch.randn(3)
    assert accumulate(None, gradient) is gradient


def test_later_ones_are_added_in_place() -> None:
    total, gradient = torch.randn(3), torch.randn(3)
    wanted = total + gradient
    assert accumulate(total, gradient) is total
    assert torch.equal(total, wanted)


def test_products_are_added_as_their_sum_is() -> None:
    a, b = (torch.randn(7, 5, dtype=torch.float64) for _ in range(2))
    total = accumulate_mm(None, a.t(), b)
    assert torch.equal(total, a.t() @ b)
    assert accumulate_mm(total, a.t(), b) is total
    torch.testing.assert_close(total, 2 * a.t() @ b, rtol=1e-14, atol=1e-14)
