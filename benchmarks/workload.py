"""What trainers are timed on: a model of equal stages with its batch; and what a trainer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """`stages` stages of `depth` layers, `width` wide, and `chunks` micro-batches of `rows` samples. A value, so that
    other processes can make the same tensors from it."""

    stages: int
    chunks: int
    rows: int
    width: int
    depth: int

    def model(self) -> nn.Sequential:
        """A child for each stage."""
        torch.manual_seed(0)
        return nn.Sequential(*(self._stage() for _ in range(self.stages)))

    def _stage(self) -> nn.Sequential:
        layers = ((nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.depth))
        return nn.Sequential(*(part for layer in layers for part in layer))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        torch.manual_seed(1)
        return torch.randn(self.rows * self.chunks, self.width), torch.randn(self.rows * self.chunks, self.width)


@dataclass(frozen=True)
class Trainer:
    """`run(steps)` trains so many steps and returns the loss of the last; `gradients` are those it left, in the order
    of the model's parameters; `tidy` collects what garbage it has elsewhere."""

    run: Callable[[int], float]
    gradients: Callable[[], list[Tensor]]
    close: Callable[[], object] = lambda: None
    tidy: Callable[[], object] = lambda: None
