"""A model that asks for checkpoints itself, and is told that the pipe decides."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpipe


class Checkpointed(nn.Module):
    """Layers that are recomputed while the model trains, as a model's own switch has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.on = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.on and self.training else layer(x)
        return x


def told(model: Checkpointed, **options: str) -> list[str]:
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pipe = fxpipe.compile(model, devices=2, chunks=4, schedule="1f1b", **options)
        for _ in range(2):
            pipe.step(x, target=y, loss_fn=F.mse_loss)
        pipe.step(x, target=y, loss_fn=F.l1_loss)
        pipe.close()
    return [str(one.message) for one in said if "checkpoints of activations" in str(one.message)]


def test_it_is_said_once_where_nothing_is_recomputed() -> None:
    (said,) = told(Checkpointed(), checkpoint="never")
    assert "test_own_checkpoints.py:" in said
    assert "its stages keep all that backward needs" in said


def test_nothing_is_said_where_stages_recompute_or_the_model_does_not_ask() -> None:
    assert not told(Checkpointed(), checkpoint="always")
    plain = Checkpointed()
    plain.on = False
    assert not told(plain, checkpoint="never")
