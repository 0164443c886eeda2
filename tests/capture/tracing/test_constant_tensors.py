"""Numbers of tensors that are made of Python's numbers are constants; those that something writes into are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxpipe
from fxpipe.capture import capture
from fxpipe.ir.graph.opaque_call import opaques


class Of(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(self.fc(x)))


def axes(x: Tensor) -> Tensor:
    return x.softmax(1) / x.sum((torch.arange(1, x.dim(), device=x.device) + 0).tolist(), keepdim=True)


def item(x: Tensor) -> Tensor:
    return x * torch.tensor(0.5, dtype=torch.float64).item() + x[..., : int(torch.full((), 4).item())]


def nested(x: Tensor) -> Tensor:
    (a, b), (c, d) = torch.eye(2).tolist()
    return x * a + x * b - x * c * d


def written(x: Tensor) -> Tensor:
    numbers = torch.arange(4)
    numbers += 1
    return x * numbers.tolist()[0]


def written_by_a_view(x: Tensor) -> Tensor:
    numbers = torch.arange(4)
    numbers[:2].add_(3)
    return x * numbers.tolist()[0]


def of_data(x: Tensor) -> Tensor:
    return x * torch.arange(int(x.abs().sum().item()) + 2).tolist()[1]


@pytest.mark.parametrize("body", [axes, item, nested], ids=lambda body: body.__name__)
def test_constants_are_folded(body: Callable[[Tensor], Tensor]) -> None:
    model, x = Of(body), torch.randn(6, 3, 4)
    assert not opaques(capture(model, (x,)))
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    torch.testing.assert_close(pipe(x), model(x))
    pipe.close()


@pytest.mark.filterwarnings("ignore:.*is kept whole")
@pytest.mark.parametrize("body", [written, written_by_a_view, of_data], ids=lambda body: body.__name__)
def test_what_is_written_or_depends_on_data_is_not(body: Callable[[Tensor], Tensor]) -> None:
    model, x = nn.Sequential(Of(body), nn.Linear(4, 4)), torch.randn(6, 4)
    pipe = fxpipe.compile(model, devices=2, chunks=1)
    torch.testing.assert_close(pipe(x), model(x))
    pipe.close()


def dice(output: Tensor, target: Tensor, batch: bool = False) -> Tensor:
    over = torch.arange(2, output.dim()).tolist()
    over = [0, *over] if batch else over
    p = output.softmax(1)
    return (1 - (2 * (p * target).sum(over) + 1) / (p.sum(over) + target.sum(over) + 1)).mean()


def test_a_loss_that_sums_over_all_axes_of_an_image() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    x = torch.randn(4, 1, 6, 6)
    y = nn.functional.one_hot(torch.randint(3, (4, 6, 6)), 3).movedim(-1, 1).float()
    pipe = fxpipe.compile(net, devices=2, chunks=2, schedule="1f1b")
    torch.testing.assert_close(pipe.step(x, target=y, loss_fn=dice), dice(net(x), y).detach())
    pipe.close()
