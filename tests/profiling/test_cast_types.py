"""Floating-point types change, all others stay."""

from __future__ import annotations

import torch
from torch import nn

from fxpipe.capture import capture
from fxpipe.ir.graph.value_types import tensors
from fxpipe.profiling.cast_types import cast


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        a, b = self.head(self.table(ids)).split(2, -1)
        return a.sum(-1) + b.sum(-1)


def test_all_tensors_but_those_of_integers() -> None:
    graph = capture(Words(), (torch.zeros(2, 5, dtype=torch.long),), {})
    half = cast(graph, "bf16")
    before, after = graph.types, half.types
    assert {t.dtype for type in before.values() for t in tensors(type)} == {"f32", "i64"}
    assert {t.dtype for type in after.values() for t in tensors(type)} == {"bf16", "i64"}
    assert cast(half, "f32") == graph
