"""A stage some of whose parameters are DTensors: tensor parallelism in code that knows nothing of it.

Generated stages call functions on plain tensors, and so does everything around them. Here a value is a DTensor for just
as long as the ranks of the mesh have different parts of it:

    x                plain: the same on every rank
      F.linear(x, up)      up is cut by rows: x is lifted, and each rank has some columns of the result
      F.gelu(...)          on those
      F.linear(..., down)  down is cut by columns: each rank has a sum of its own, which are added up at once
    y                plain again

Where it is lifted, its gradient is the sum of what the ranks have for it, as it is with torch's ColwiseParallel and
RowwiseParallel, whose hooks on modules do the same. What DTensor knows no rule for, it refuses by name.
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
from torch.utils import _pytree as pytree

from .stage import Stage


@dataclass(frozen=True)
class Layout:
    """Which part of a tensor of this shape each rank of a mesh has."""

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
        """The tensor of which this is the part here. A gradient comes back for the part, in the same layout."""
        found: DTensor = DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return found


class Parts(TorchFunctionMode):
    """In this context plain tensors that meet DTensors are lifted to what all ranks of the mesh have alike; results
    that all have alike, or that are to be added up, become plain."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh, self.alike = mesh, (Replicate(),) * mesh.ndim

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if writes(func) and isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
            return func(*pytree.tree_map(self.plain, args), **pytree.tree_map(self.plain, kwargs))
        args, kwargs = pytree.tree_map(self.lift, (args, kwargs))
        return pytree.tree_map(self.settle, func(*args, **kwargs))

    def lift(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        return DTensor.from_local(value, self.mesh, self.alike, run_check=False)

    def settle(self, value: Any) -> Any:
        cut = isinstance(value, DTensor) and any(placement.is_shard() for placement in value.placements)
        return value if cut else self.plain(value)

    def plain(self, value: Any) -> Any:
        return value.redistribute(placements=self.alike).to_local() if isinstance(value, DTensor) else value


def writes(func: Any) -> bool:
    """Whether a function of torch writes into its first argument: `add_`, `__setitem__`, `__iadd__`."""
    name: str = getattr(func, "__name__", "")
    return name.startswith(("__set", "__i")) if name.startswith("__") else name.endswith("_")


def compute_sharded(stage: Stage, layouts: Mapping[str, Layout]) -> Callable[..., Any]:
    """A forward for the stage, which holds its part of the tensors with these paths. Takes and gives plain tensors."""
    run, mesh = stage.forward, next(iter(layouts.values())).mesh

    def forward(*args: Any) -> Any:
        parts = Parts(mesh)
        with whole_tensors(stage, layouts):
            with parts:
                found = run(*args)
            return pytree.tree_map(parts.plain, found)

    return forward


@contextmanager
def whole_tensors(stage: Stage, layouts: Mapping[str, Layout]) -> Iterator[None]:
    """In this context the stage holds DTensors, made of its parts."""
    slots = [(*stage.slot(path), layout) for path, layout in layouts.items()]
    parts = [held[name] for held, name, _ in slots]
    try:
        for held, name, layout in slots:
            held[name] = layout.whole(held[name])
        yield
    finally:
        for (held, name, _), part in zip(slots, parts, strict=True):
            held[name] = part
