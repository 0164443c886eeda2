"""Values of single samples, for loops in which each sample has numbers of its own: a vmap cannot do these.

    s = each_sample(x)                  s: x[0], x[1], ...
    n = each_sample(lengths).item()     n: 6, 5, ...
    mean = s[:n].mean(0)                of each sample, with its own n
    pooled = stacked(mean)              f32[b, 8]

What is done with such values is done for one sample after the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
    "eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "getitem",
)  # fmt: skip
REFLECTED = OPERATORS[: OPERATORS.index("eq")]


class Samples:
    """The values of all samples, in order. Functions of torch, methods and operators return those of their results."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Samples:
        return for_each(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Callable[..., Samples]:
        if name.startswith("__"):
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> Samples:
            return for_each(lambda value, *args, **kwargs: getattr(value, name)(*args, **kwargs), (self, *args), kwargs)

        return method


def _add_operator(name: str, swapped: bool = False) -> None:
    function = getattr(operator, f"{name}_" if name in ("and", "or") else name)

    def method(self: Samples, *others: Any) -> Samples:
        return for_each(function, (*others, self) if swapped else (self, *others), {})

    setattr(Samples, f"__{'r' if swapped else ''}{name}__", method)


for _name in OPERATORS:
    _add_operator(_name)
for _name in REFLECTED:
    _add_operator(_name, swapped=True)


def for_each(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Samples:
    """What a function returns for each sample; other values than `Samples` are the same for all."""
    count = next(len(found.values) for found in _samples((args, kwargs)))
    return Samples([function(*_of(args, i), **_of(kwargs, i)) for i in range(count)])


def _samples(nest: Any) -> list[Samples]:
    if isinstance(nest, Samples):
        return [nest]
    if isinstance(nest, slice):
        nest = (nest.start, nest.stop, nest.step)
    items = nest.values() if isinstance(nest, Mapping) else nest if isinstance(nest, (tuple, list)) else ()
    return [found for item in items for found in _samples(item)]


def _of(nest: Any, i: int) -> Any:
    """The arguments for sample i."""
    if isinstance(nest, Samples):
        return nest.values[i]
    if isinstance(nest, slice):
        return slice(_of(nest.start, i), _of(nest.stop, i), _of(nest.step, i))
    if isinstance(nest, Mapping):
        return {key: _of(item, i) for key, item in nest.items()}
    if isinstance(nest, (tuple, list)):
        items = [_of(item, i) for item in nest]
        return items if isinstance(nest, list) else tuple(items)
    return nest


def each_sample(x: Tensor, dim: int = 0) -> Samples:
    """The samples of a tensor, which lie along a dimension."""
    return Samples(x.unbind(dim))


def stacked(of_each: Samples) -> Tensor:
    """[b, ...]: the values of all samples, which have one shape."""
    return torch.stack(of_each.values)
