"""What the ops of a layer make, known from one run of the layer's graph for all layers that are like it.

    first layer   y = linear(x, w)   a fake tensor, in memory 17    run, and its writes observed
    next layer    y = linear(x, w)   `Known`: like that one, in memory -1

Inside of a layer nobody needs the tensors themselves, only their types and which of them share memory. What a layer
returns has memory of its own, and is a fake tensor of the model's trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.torch_internals.compiling.vmap_levels import outside_vmaps
from fxpipe.torch_internals.tensor_memory import memory_key

memory_numbers = itertools.count(-1, -1)  # of memory that is no storage's


@dataclass(frozen=True, eq=False)
class Known:
    """A tensor like another one, in other memory: that of a storage, or a number below 0."""

    like: Tensor
    memory: int

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def device(self) -> torch.device:
        return self.like.device

    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    @property
    def requires_grad(self) -> bool:
        return self.like.requires_grad


@dataclass(frozen=True, eq=False)
class LayerRun:
    """A run of a layer's graph on fake tensors.

    - `values`: what each node made.
    - `written`: the memory that each op wrote; `random`: the ops that drew random numbers.
    """

    values: dict[fx.Node, Any]
    written: dict[fx.Node, tuple[int, ...]]
    random: frozenset[fx.Node]


@dataclass(frozen=True, eq=False)
class PlacedLayer:
    """A layer in the graph of the model.

    - `run`: that of the first layer which is like it.
    - `given`: the node here of each placeholder of its graph.
    - `made`: the fake tensor here for each one that it returns.
    """

    run: LayerRun
    given: Mapping[fx.Node, fx.Node]
    made: tuple[tuple[Tensor, Tensor], ...]  # (in the run, here)


@dataclass
class LayerValues:
    """The values of one placed layer while those of the graph are found.

    - `here`: by the id of a tensor of the run, what it is here; `memories`: the memory here by that of the run.
    """

    layer: PlacedLayer
    here: dict[int, Any] = field(default_factory=dict)
    memories: dict[int, int] = field(default_factory=dict)

    def begin(self, env: Mapping[fx.Node, Any]) -> None:
        """Take what the layer is given, and what it returns."""
        pairs = [(self.layer.run.values[inner], env[node]) for inner, node in self.layer.given.items()]
        for old, new in (*pairs, *self.layer.made):
            if isinstance(old, Tensor):
                self.here[id(old)] = new
                self.memories[memory_key(old)] = new.memory if isinstance(new, Known) else memory_key(new)

    def value(self, node: fx.Node) -> Any:
        """What a node of the layer's graph makes here."""
        return self._of(self.layer.run.values[node])

    def written(self, node: fx.Node) -> tuple[int, ...]:
        """The memory that it writes here, of what has a node."""
        return tuple(self.memories[key] for key in self.layer.run.written[node] if key in self.memories)

    def _of(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            items = [self._of(item) for item in value]
            return items if type(value) is list else _rebuilt(type(value), items)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.here:
            key = memory_key(outside_vmaps(value))
            if key not in self.memories:
                self.memories[key] = next(memory_numbers)
            self.here[id(value)] = Known(value, self.memories[key])
        return self.here[id(value)]


def _rebuilt(kind: type, items: list[Any]) -> Any:
    """A tuple, maybe with names."""
    return kind._make(items) if hasattr(kind, "_make") else kind(items)
