"""Operations of each kind of product, against torch's own counter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fxpipe.profiling.flops import products

X = torch.randn(2, 4, 9, 9)
SEQ = torch.randn(2, 3, 7, 8)

CASES = {
    "conv2d": (F.conv2d, (X, torch.randn(8, 2, 3, 3)), {"groups": 2}),
    "conv1d": (F.conv1d, (X[0], torch.randn(8, 9, 3)), {}),
    "conv_transpose2d": (F.conv_transpose2d, (X, torch.randn(4, 6, 3, 3)), {"stride": 2}),
    "linear": (F.linear, (SEQ, torch.randn(5, 8), torch.randn(5)), {}),
    "matmul": (torch.matmul, (SEQ, SEQ.mT), {}),
    "bmm": (torch.bmm, (SEQ[0], SEQ[0].mT), {}),
    "addmm": (torch.addmm, (torch.randn(5), SEQ[0, 0], torch.randn(8, 5)), {}),
    "baddbmm": (torch.baddbmm, (torch.randn(3, 7, 7), SEQ[0], SEQ[0].mT), {}),
    "einsum": (torch.einsum, ("bhqd,bhkd->bhqk", SEQ, torch.randn(2, 3, 5, 8)), {}),
    "scaled_dot_product_attention": (
        F.scaled_dot_product_attention,
        (SEQ, torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)),
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_counter(name):
    function, args, kwargs = CASES[name]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # torch counts no flash on CPU
        result = function(*args, **kwargs)
    shapes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
    assert products(name, args, shapes, shapes[1:], result.numel()) == counter.get_total_flops() > 0


def test_products_that_the_counter_does_not_know():
    assert products("inner", (), [(3, 4), (5, 4)], [], 15) == products("linear", (), [(3, 4), (5, 4)], [], 15) == 120
    assert products("vdot", (), [(4,), (4,)], [], 1) == 8


def test_recurrent_ops_multiply_each_row_with_all_weights():
    weights = [(32, 4), (32, 8), (32,), (32,)]
    assert products("lstm", (), [(7, 2, 4), (1, 2, 8), (1, 2, 8), *weights], weights, 7 * 2 * 8) == 2 * 14 * 32 * 12


def test_others_have_no_products():
    assert products("relu", (), [(3, 4)], [], 12) == 0
    assert products("matmul", (), [(3, 4)], [], 12) == 0  # of which only one operand is a tensor
