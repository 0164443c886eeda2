"""What the arguments of convolutions and pools say of their windows, beside what torch makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxpipe.ir.graph.graph import Op, Origin, Ref
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.operators.convolution_windows import Windows, of_convolution, of_pool


def op(target: Any, *args: Any, **kwargs: Any) -> Op:
    return Op("y", target, (Ref("x"), *args), kwargs, TensorType("f32", (), "cpu"), Origin("net.py", 1, "", ""))


def left(windows: Windows) -> list[int]:
    """The sizes of what windows leave of 9 by 9."""
    return [(9 + 2 * before - size) // stride + 1 for size, stride, before in zip(*windows, strict=True)]


@pytest.mark.parametrize(
    ("given", "named", "windows"),
    [
        ((), {}, Windows((3, 2), (1, 1), (0, 0))),
        ((None, 2, 1), {}, Windows((3, 2), (2, 2), (1, 1))),
        ((None, (2,)), {"padding": (1,)}, Windows((3, 2), (2, 2), (1, 1))),
        ((), {"stride": (2, 1), "dilation": (1, 3)}, Windows((3, 4), (2, 1), (0, 0))),
        ((), {"padding": "valid"}, Windows((3, 2), (1, 1), (0, 0))),
        ((), {"padding": "same", "dilation": 2}, Windows((5, 3), (1, 1), (2, 1))),
    ],
)
def test_convolutions(given: tuple[Any, ...], named: dict[str, Any], windows: Windows) -> None:
    found = of_convolution(op(F.conv2d, Ref("w"), *given, **named), (3, 2))
    assert found == windows
    if named.get("padding") != "same":  # where there may be another row behind
        made = F.conv2d(torch.zeros(1, 1, 9, 9), torch.zeros(1, 1, 3, 2), *given, **named)
        assert list(made.shape[2:]) == left(windows)


@pytest.mark.parametrize(
    ("target", "given", "named", "windows"),
    [
        (F.max_pool2d, (2,), {}, Windows((2, 2), (2, 2), (0, 0))),
        (F.max_pool2d, ((3, 2), 1), {"padding": 1, "dilation": 2}, Windows((5, 3), (1, 1), (1, 1))),
        (F.max_pool2d, (3, (2,), (1, 0), (1, 2)), {}, Windows((3, 5), (2, 2), (1, 0))),
        (F.avg_pool2d, (3, None, 1, False), {}, Windows((3, 3), (3, 3), (1, 1))),  # no dilation: ceil_mode
        (F.avg_pool2d, ((3, 2),), {"stride": (1, 2)}, Windows((3, 2), (1, 2), (0, 0))),
    ],
)
def test_pools(target: Any, given: tuple[Any, ...], named: dict[str, Any], windows: Windows) -> None:
    assert of_pool(op(target, *given, **named), 2) == windows
    assert list(target(torch.zeros(1, 1, 9, 9), *given, **named).shape[2:]) == left(windows)
