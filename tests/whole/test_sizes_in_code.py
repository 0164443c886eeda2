"""Generated backward of models in which sizes decide: which ops run, how many, or for which batches the graph holds."""

from __future__ import annotations

import copy
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe


class Steps(nn.Module):
    """Runs as many ops as its input is long."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Linear(3, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0].mean(1))


def test_a_length_that_decides_how_many_ops_run_is_left_to_autograd() -> None:
    model = Steps().double()
    plain, pipe = copy.deepcopy(model), fxpipe.compile(model, 2, 2, backward="code")
    for length in (5, 7, 9):
        x, y = torch.randn(4, length, 3, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
        pipe.step(x, target=y, loss_fn=F.mse_loss)
        F.mse_loss(plain(x), y).backward()
        for own, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, wanted.grad, rtol=0, atol=1e-12)
    assert "unbind gives seq tensors, so how many ops follow depends on a size" in pipe.explain()
    pipe.close()


class Counts(nn.Module):
    """Uses the number of samples as a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        count = sum(1 for _ in range(x.shape[0]))
        return self.last(torch.tanh(self.first(x)).reshape(count, 2, 4).transpose(1, 2).reshape(count, 8))


class FewSamples(nn.Module):
    """Asks whether there are few samples, and calls a function that takes their number as a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).view(-1, 2, 2, 2)
        h = h.contiguous() if x.shape[0] >= 64 else h
        return self.last(F.interpolate(h, scale_factor=2.0, mode="nearest").mean(1).view(-1, 2, 8).sum(1))


@pytest.mark.parametrize("kind", [Counts, FewSamples])
def test_a_graph_for_some_sizes_of_batch_has_code_for_these(kind: type[nn.Module]) -> None:
    model = kind().double()
    with closing(fxpipe.compile(model, 2, 2, backward="code")) as pipe:
        for samples in (4, 6):
            x = torch.rand(samples, 4, dtype=torch.float64)
            model.zero_grad()
            pipe.step(x, loss_fn=torch.mean)
            found = [p.grad for p in model.parameters()]
            model.zero_grad()
            model(x).mean().backward()
            for mine, own in zip(found, model.parameters(), strict=True):
                torch.testing.assert_close(mine, own.grad)
            assert not any(stage.autograd_because for stage in pipe.build.program.stages)
