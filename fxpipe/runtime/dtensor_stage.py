"""Stages with DTensor parameters: tensor parallelism, without changes to the generated code.

Generated stages call functions on plain tensors, and so does everything around them. Here a value is a DTensor only
while the ranks of the mesh have different parts of it:

    x                plain: the same on every rank
      F.linear(x, up)      up is cut by rows: x is lifted, and each rank has some columns of the result
      F.gelu(...)          on those
      F.linear(..., down)  down is cut by columns: each rank has a sum of its own, which are added up at once
    y                plain again

The gradient of a lifted value is the sum over the ranks, as with torch's ColwiseParallel and RowwiseParallel, whose
hooks on modules do the same. An op for which DTensor has no rule raises DTensor's error, which names the op.

Where an op makes one result of all parts, only sums of products and plain sums are left to DTensor: other ops get the
whole values. DTensor's gradients of means of losses divide by the number of elements of a part, and it adds up norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from fxpipe.torch_internals.pytrees import tree_leaves, tree_map

from .stage import Stage

SUMS = {"addmm", "baddbmm", "bmm", "einsum", "embedding", "linear", "matmul", "mean", "mm", "mv", "sum"}


@dataclass(frozen=True)
class Layout:
    """Which part of a tensor each rank of a mesh has. `shape` and `stride` are those of the whole tensor."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: DTensor) -> Layout:
        return Layout(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    @property
    def cut(self) -> bool:
        """Whether the ranks have different parts."""
        return not all(placement.is_replicate() for placement in self.placements)

    def whole(self, part: Tensor) -> DTensor:
        """The DTensor of which `part` is this rank's part. Its gradient comes back to the part, in the same layout."""
        found: DTensor = DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return found


class Parts(TorchFunctionMode):
    """In this context plain tensors in a call with DTensors are lifted to replicated DTensors. Results become plain,
    after addition where they are partial sums, unless the ranks have different parts of them."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh, self.alike = mesh, (Replicate(),) * mesh.ndim

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if writes(func) and isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
            return func(*tree_map(self.plain, args), **tree_map(self.plain, kwargs))
        args, kwargs = tree_map(self.lift, (args, kwargs))
        found = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, DTensor)]
        if results and not adds_up(func) and not any(map(cut, results)) and any(map(cut, tree_leaves((args, kwargs)))):
            return func(*tree_map(self.plain, args), **tree_map(self.plain, kwargs))
        return tree_map(self.settle, found)

    def lift(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        return DTensor.from_local(value, self.mesh, self.alike, run_check=False)

    def settle(self, value: Any) -> Any:
        return value if cut(value) else self.plain(value)

    def plain(self, value: Any) -> Any:
        return value.redistribute(placements=self.alike).to_local() if isinstance(value, DTensor) else value


def cut(value: Any) -> bool:
    """Whether the ranks have different parts of a value."""
    return isinstance(value, DTensor) and any(placement.is_shard() for placement in value.placements)


def adds_up(func: Any) -> bool:
    """Whether a function of torch that takes parts and gives a whole result adds up what it computes of the parts."""
    return getattr(func, "__name__", "").strip("_").removeprefix("r") in SUMS


def writes(func: Any) -> bool:
    """Whether a function of torch writes into its first argument: `add_`, `__setitem__`, `__iadd__`."""
    name: str = getattr(func, "__name__", "")
    return name.startswith(("__set", "__i")) if name.startswith("__") else name.endswith("_")


Forward = Callable[..., Any]


def compute_sharded(stage: Stage, layouts: Mapping[str, Layout]) -> Forward:
    """A forward for a stage that holds only this rank's part of the tensors at the paths of `layouts`. It takes and
    gives plain tensors."""
    run, mesh = stage.forward, next(iter(layouts.values())).mesh

    def forward(*args: Any) -> Any:
        parts = Parts(mesh)
        with whole_tensors(stage, layouts):
            with parts:
                found = run(*args)
            return tree_map(parts.plain, found)

    return forward


@contextmanager
def whole_tensors(stage: Stage, layouts: Mapping[str, Layout]) -> Iterator[None]:
    """In this context the stage holds DTensors made of its parts."""
    slots = [(*stage.slot(path), layout) for path, layout in layouts.items()]
    parts = [held[name] for held, name, _ in slots]
    try:
        for held, name, layout in slots:
            held[name] = layout.whole(held[name])
        yield
    finally:
        for (held, name, _), part in zip(slots, parts, strict=True):
            held[name] = part
