"""Nests of tensors with dataclasses in them: taken apart into those of micro-batches, and put together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def join(function: Callable[..., Any], nests: Sequence[Any]) -> Any:
    """The nest of `function(leaves)`, for nests of one form."""
    first = nests[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        fields = dataclasses.fields(first)
        return type(first)(**{f.name: join(function, [getattr(nest, f.name) for nest in nests]) for f in fields})
    if isinstance(first, dict):
        return {key: join(function, [nest[key] for nest in nests]) for key in first}
    if isinstance(first, (tuple, list)):
        items = [join(function, row) for row in zip(*nests, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return function(nests)


def unpacked(nest: Any) -> Any:
    """The nest as pytree can walk it: dicts with their class's name where there were dataclasses."""
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        fields = {f.name: unpacked(getattr(nest, f.name)) for f in dataclasses.fields(nest)}
        return {f"{type(nest).__name__}.{name}": value for name, value in fields.items()}
    if isinstance(nest, dict):
        return {key: unpacked(value) for key, value in nest.items()}
    if isinstance(nest, (tuple, list)):
        items = [unpacked(item) for item in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    return nest


def tensors(nest: Any) -> list[Tensor]:
    """All tensors in the nest."""
    found: list[Tensor] = []

    def look(leaves: Sequence[Any]) -> None:
        found.extend(leaf for leaf in leaves if isinstance(leaf, Tensor))

    join(look, [nest])
    return found


def cast(nest: Any, dtype: torch.dtype) -> Any:
    """The nest with its floating-point tensors in `dtype`, new leaves of autograd."""

    def change(leaves: Sequence[Any]) -> Any:
        (leaf,) = leaves
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.detach().to(dtype, copy=True).requires_grad_(leaf.requires_grad)

    return join(change, [nest])


def cut(nest: Any, sizes: Sequence[int]) -> list[Any]:
    """The nest for each of the micro-batches of these sizes, with memory of its own."""
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]

    def piece(start: int, end: int) -> Callable[[Sequence[Any]], Any]:
        return lambda leaves: leaves[0][start:end].clone() if isinstance(leaves[0], Tensor) else leaves[0]

    return [join(piece(end - size, end), [nest]) for size, end in zip(sizes, ends, strict=True)]


def together(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The output of the batch from those of its micro-batches; numbers are means over samples."""

    def leaf(parts: Sequence[Any]) -> Any:
        if not isinstance(parts[0], Tensor):
            return parts[0]
        if parts[0].dim():
            return torch.cat(list(parts))
        return torch.stack([part * size / sum(sizes) for part, size in zip(parts, sizes, strict=True)]).sum()

    return join(leaf, outputs)
