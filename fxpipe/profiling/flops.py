"""Floating-point operations of an op, from the shapes of its operands and its result. Runs nothing and needs no torch.

Nearly all of them are in products of matrices, of which each kind has its rule in `products`. All other ops do a few
operations for each element and are bounded by memory, so only their elements are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from fxpipe.ir.graph.ops import MATMULS, RECURRENT

Shape = Sequence[int]

# Ops that multiply every row of their first operand with all their weights.
BY_ROWS = RECURRENT | {"multi_head_attention_forward"}


def products(name: str, args: Sequence[Any], operands: Sequence[Shape], weights: Sequence[Shape], out: int) -> int:
    """Floating-point operations of an op that multiplies matrices; 0 for any other.

    - `operands`: the shapes of all tensors it reads, in order.
    - `weights`: the shapes of those that are the model's own.
    - `out`: the number of elements of its result.

    >>> products("linear", (), [(8, 16), (4, 16), (4,)], [(4, 16), (4,)], 8 * 4)
    1024
    >>> products("inner", (), [(), (4, 16)], [], 4 * 16)  # a number times a matrix
    128
    """
    if name in BY_ROWS:
        rows = prod(operands[0][:-1])
        length = operands[0][0] if name == "multi_head_attention_forward" else 0  # each position attends to each other
        return 2 * rows * sum(prod(w) for w in weights if len(w) > 1) + 4 * prod(operands[0]) * length
    if name == "einsum" and isinstance(args[0], str):
        return _einsum(args[0], operands, out)
    rule = _RULES.get(name)
    return rule(operands, out) if rule and len(operands) > 1 else 0


def _conv(operands: Sequence[Shape], out: int) -> int:
    weight = operands[1]
    return 2 * out * prod(weight[1:])


def _conv_transpose(operands: Sequence[Shape], out: int) -> int:
    return 2 * prod(operands[0]) * prod(operands[1][1:])


def _matmul(operands: Sequence[Shape], out: int) -> int:
    return 2 * out * prod(operands[0][-1:])


def _added_matmul(operands: Sequence[Shape], out: int) -> int:
    return 2 * out * operands[1][-1]


def _bilinear(operands: Sequence[Shape], out: int) -> int:
    return 2 * out * prod(operands[2][1:])


def _attention(operands: Sequence[Shape], out: int) -> int:
    queries, keys = operands[:2]
    return 2 * (prod(queries) + out) * keys[-2]


def _einsum(equation: str, operands: Sequence[Shape], out: int) -> int:
    terms = equation.replace(" ", "").split("->")[0].split(",")
    sizes: Mapping[str, int] = {
        letter: size
        for term, shape in zip(terms, operands, strict=False)
        for letter, size in zip(term, shape, strict=False)
    }
    return 2 * (prod(sizes.values()) if "." not in equation else out * prod(operands[0][-1:]))


_RULES: dict[str, Callable[[Sequence[Shape], int], int]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _conv),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _conv_transpose),
    **dict.fromkeys(MATMULS, _matmul),
    **dict.fromkeys(("addmm", "addmv", "addbmm", "baddbmm"), _added_matmul),
    "bilinear": _bilinear,
    "scaled_dot_product_attention": _attention,
}
