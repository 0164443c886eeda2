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


@contextmanager
def scratch(stage: Stage, kept: Mapping[str, Tensor]) -> Iterator[None]:
    """In this context the stage's `mutates` are scratch tensors; then the real ones are back, untouched."""
    real = {path: stage.tensor(path) for path in stage.mutates}
    for path, buffer in real.items():
        stage.put(path, kept[path].clone() if path in kept else torch.zeros_like(buffer))
    try:
        yield
    finally:
        for path, buffer in real.items():
            stage.put(path, buffer)
