"""Buffers that forward writes, left alone by recomputation.

A stage that counts or keeps running statistics changes its buffers once per micro-batch, in forward. When the same
forward runs again in backward it must not count twice, so it gets scratch tensors in their place. Where the stage
also reads what the buffer held (`rereads`), the scratch tensor holds what was there before the forward run; else its
contents do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from .stage import Stage


def keep(stage: Stage) -> dict[str, Tensor]:
    """Copies of the buffers that a recomputation will read; call it before the forward run."""
    return {path: stage.tensor(path).detach().clone() for path in stage.rereads}


def scratch(stage: Stage, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scratch tensors for the buffers that the stage writes, by path."""
    return {
        path: kept[path].clone() if path in kept else torch.zeros_like(stage.tensor(path)) for path in stage.mutates
    }


@contextmanager
def instead(stage: Stage, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """In this context the stage holds these tensors at these paths; then its own are back, untouched."""
    own = {path: stage.tensor(path) for path in tensors}
    try:
        for path, tensor in tensors.items():
            stage.put(path, tensor)
        yield
    finally:
        for path, tensor in own.items():
            stage.put(path, tensor)
