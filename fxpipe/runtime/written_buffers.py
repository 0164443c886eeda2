"""Protects tensors of the model that forward writes from recomputation.

A stage that counts, keeps running statistics or normalises a weight in place changes its buffers and parameters once
per micro-batch, in forward. A recomputation must not change them a second time, so it gets scratch tensors in their
place. If the stage also reads the old contents of a tensor (`rereads`), the scratch tensor has the contents from before
the forward run; else its contents do not matter. The gradient of a scratch tensor goes to the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .stage import Stage


def keep(stage: Stage) -> dict[str, Tensor]:
    """Copies of the written tensors that a recomputation will read; call it before the forward run."""
    return {path: stage.tensor(path).detach().clone() for path in stage.rereads}


class Scratch(Function):
    """A scratch tensor in the place of a parameter, with a copy of `contents`. Passes its gradient to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, contents: Tensor) -> Tensor:
        return contents.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def scratch(stage: Stage, kept: Mapping[str, Tensor], aliases: Mapping[int, Tensor] | None = None) -> dict[str, Tensor]:
    """Scratch tensors for the tensors that the stage writes, by path. `aliases`: by a parameter's id, the alias that
    gets its gradient. Call it with gradients enabled."""
    made = {}
    for path in stage.mutates:
        own = stage.tensor(path)
        contents = kept[path] if path in kept else torch.zeros_like(own)
        own = own if aliases is None else aliases.get(id(own), own)
        made[path] = Scratch.apply(own, contents) if own.requires_grad else contents.clone()  # type: ignore[no-untyped-call]
    return made


@contextmanager
def instead(stage: Stage, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """In this context the stage holds these tensors at these paths; afterwards its own are restored, unchanged."""
    own = {path: stage.tensor(path) for path in tensors}
    try:
        for path, tensor in tensors.items():
            stage.put(path, tensor)
        yield
    finally:
        for path, tensor in own.items():
            stage.put(path, tensor)
