"""Which values can be cut between samples, and along which dimension."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxpipe.capture import capture, sample_dims


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.weight.exp()
        turned = (x * scale).transpose(0, 1)
        flat = x.reshape(-1, 4).sin()
        both = torch.cat([x, x]).cos()
        picked = x[torch.arange(x.shape[0]), x.sum((1, 2)).long() % 5]
        return (turned.sum(0) + picked + flat.view(x.shape).sum(1) + both.chunk(2)[0].sum(1)), x.mean()


def test_dimensions() -> None:
    graph = capture(Net(), (torch.randn(3, 5, 4),), reduce={"mean": "mean"})
    found = sample_dims(graph)
    by_call = {str(getattr(op.target, "__name__", op.target)): op.name for op in graph.ops}
    assert found["x"] == 0
    assert found[by_call["exp"]] is None  # of parameters alone
    assert found[by_call["transpose"]] == 1
    assert found[by_call["sin"]] == 0  # five places for each sample
    for name in ("cos", "arange", "mean"):  # twice the batch, one after the other; row numbers; one for all
        assert by_call[name] not in found
