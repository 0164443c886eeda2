"""Lists of tensors beside a batch, with an item for each sample: such as the masks of the things in each image."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxpipe
from fxpipe.errors import InputError
from tests.helpers.marks import mostly_slow

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* kept whole"),
    pytest.mark.filterwarnings("error::fxpipe.errors.MixedSamplesWarning"),
]


class Masks(nn.Module):
    """Three masks in each image, and a loss that takes the nearest of these for each mask of a list, by the number of
    masks in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.masks = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 12)
        self.weight = nn.Buffer(torch.tensor([1.0, 0.5, 2.0]))

    def _start(self) -> None:
        nn.init.normal_(self.masks.weight)

    def forward(self, x: Tensor, masks: list[Tensor], kinds: list[Tensor]) -> dict[str, Tensor]:
        x = torch.tanh(self.middle(torch.tanh(self.down(x))))
        found = self.masks(x).view(-1, 3, 2, 2)
        return {"loss": self.loss(found, masks, kinds), "masks": found}

    def loss(self, found: Tensor, masks: list[Tensor], kinds: list[Tensor]) -> Tensor:
        total = found.new_zeros(())
        for own, mask, kind in zip(found, masks, kinds, strict=True):
            nearest = torch.cdist(own.detach().flatten(1), mask.flatten(1)).min(0).indices.tolist()
            each = F.mse_loss(own[nearest], mask, reduction="none").mean((1, 2))
            total = total + (each * self.weight[kind]).sum()
        return total / sum(len(mask) for mask in masks)


COUNTS = {
    "of several sizes": (1, 3, 2, 1),
    "all of one": (1, 1, 1, 1),
    "all of another": (3, 3, 3, 3),
    "one as many as samples": (4, 1, 2, 4),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("chunks", mostly_slow([2, 4], (2).__eq__))
def test_their_items_are_the_samples(name: str, chunks: int) -> None:
    torch.manual_seed(0)
    model, counts, x = Masks().double(), COUNTS[name], torch.randn(4, 6).double()
    pipe = fxpipe.compile(copy.deepcopy(model), devices=2, chunks=chunks)
    for of in (counts, (2, 1, 1, 5)):
        masks = [torch.rand(count, 2, 2).double() for count in of]
        kinds = [torch.randint(3, (count,)) for count in of]
        found = pipe.step(x, masks=masks, kinds=kinds)
        model.zero_grad()
        loss = model(x, masks, kinds)["loss"]
        loss.backward()
        torch.testing.assert_close(found, loss.detach(), rtol=1e-9, atol=1e-12)
        for path, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, dict(model.named_parameters())[path].grad, rtol=1e-9, atol=1e-12)
        pipe.zero_grad()
    assert len(pipe.stages) == 2


def test_as_many_rows_as_samples_in_all_of_them_are_rows_of_the_samples() -> None:
    """Which this model does not mean: never a wrong loss in silence."""
    torch.manual_seed(0)
    model, x = Masks().double(), torch.randn(3, 6).double()
    masks, kinds = [torch.rand(3, 2, 2).double() for _ in range(3)], [torch.randint(3, (3,)) for _ in range(3)]
    expected = model(x, masks, kinds)["loss"]
    told = fxpipe.compile(copy.deepcopy(model), 2, 3, batch_dim={"masks": "items", "kinds": "items"})
    torch.testing.assert_close(told.step(x, masks=masks, kinds=kinds), expected.detach(), rtol=1e-9, atol=1e-12)
    try:
        found = fxpipe.compile(copy.deepcopy(model), 2, 3).step(x, masks=masks, kinds=kinds)
    except (fxpipe.FxpipeError, fxpipe.MixedSamplesWarning):
        return
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)


class Pooled(Masks):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()

    def forward(self, x: Tensor, bags: list[Tensor]) -> Tensor:  # type: ignore[override]
        return self.masks(torch.tanh(self.middle(torch.tanh(self.down(x + self.pool(x, bags))))))


class Pool(nn.Module):
    def forward(self, x: Tensor, bags: list[Tensor]) -> Tensor:
        return torch.stack([x[at] * bag.mean(0) for at, bag in enumerate(bags)])


class Noisy(Pool):
    def forward(self, x: Tensor, bags: list[Tensor]) -> Tensor:
        return super().forward(x + torch.randn(()), bags)


class Scaled(nn.Module):
    """A scale for each layer, of which there are as many as samples."""

    def forward(self, x: Tensor, scales: list[Tensor]) -> Tensor:
        for scale in scales:
            x = torch.tanh(x * scale.mean(0))
        return x


def test_each_sample_s_item_is_seen_to_be_its_own() -> None:
    torch.manual_seed(0)
    model, x = Pooled().double(), torch.randn(4, 6).double()
    bags = [torch.randn(count, 6).double() for count in (2, 5, 1, 3)]
    torch.testing.assert_close(fxpipe.compile(copy.deepcopy(model), 2, 2)(x, bags), model(x, bags))
    for other in (Scaled(), Noisy()):
        model.pool = other  # type: ignore[assignment]
        with pytest.raises(InputError, match="or 'items' for a list whose items are the samples"):
            fxpipe.compile(copy.deepcopy(model), 2, 2)(x, bags)


class ScaledLoss(nn.Module):
    """And in a loss that is kept whole, for its scales are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(6, 6)

    def forward(self, x: Tensor, scales: list[Tensor]) -> Tensor:
        x = self.down(x)
        return sum((x * scale.mean(0)).square().mean() for scale in scales if scale.sum() < 1e9)  # type: ignore[return-value]


def test_a_list_is_not_supposed_to_be_of_the_samples_where_the_loss_is_said_to_be_a_mean() -> None:
    """The loss of each micro-batch would be that of some of the scales."""
    torch.manual_seed(0)
    model, x = ScaledLoss().double(), torch.randn(4, 6).double()
    scales = [torch.randn(count, 6).double() for count in (2, 5, 1, 3)]
    try:
        found = fxpipe.compile(copy.deepcopy(model), 2, 2, reduce="mean").step(x, scales, loss_fn=lambda loss: loss)
    except fxpipe.FxpipeError:
        return
    torch.testing.assert_close(found, model(x, scales).detach(), rtol=1e-9, atol=1e-12)
