"""What a message about a loss, a list of samples or a global variable says to write: it is written, and works."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.remedies import WIDTH, Case, Net, Part, Step, X, Y, cases, check

NORM = nn.BatchNorm1d(WIDTH, affine=False).double()
BAGS = list(torch.cat([X, Y]).split([1, 3, 2, 2]))
PADDED = nn.utils.rnn.pad_sequence(BAGS, batch_first=True)
THERE = torch.arange(3) < torch.tensor([[1], [3], [2], [2]])
INNER = 1e9  # what no loss of these samples is


# Losses -------------------------------------------------------------------------------------------------------------


class Largest(nn.Module):
    """With a layer, which is not to run on the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(self.head(output), target)
        if loss > INNER:
            loss = loss / INNER
        return loss


LARGEST = Largest()


def in_a_dict(output: Tensor, target: Tensor) -> Any:
    return {"loss": F.mse_loss(output, target), "of": output}


def a_number(output: Tensor, target: Tensor) -> Any:
    return F.mse_loss(output, target).item()


def detached(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.detach(), target)


def of_each_place(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="none").mean(0)


LOSS = {
    "kept, mean": Case(
        ("loss_fn is kept whole", "nothing tells whether", "write reduce={'loss': 'mean'}"),
        Step(loss_fn=LARGEST),
        Step(loss_fn=LARGEST, options={"reduce": {"loss": "mean"}}),
        kept=True,
    ),
    "kept, traced": Case(
        ("loss_fn is kept whole", "or, to have loss_fn traced, write torch.where(condition, a, b)"),
        Step(loss_fn=LARGEST),
        Step(),
    ),
    "dict": Case(
        ("no tensor; let it return the loss alone, write ['loss'] of that",),
        Step(loss_fn=in_a_dict),
        Step(loss_fn=lambda output, target: in_a_dict(output, target)["loss"]),
        line=False,
    ),
    "number": Case(
        ("a number of Python's, no tensor; let it return the tensor, without .item() or float()",),
        Step(loss_fn=a_number),
        Step(),
        line=False,
    ),
    "detached": Case(("needs no gradient", "without detach()"), Step(loss_fn=detached), Step()),
    "of each place": Case(
        ("neither one number nor one for each sample; take the mean",),
        Step(loss_fn=of_each_place),
        Step(loss_fn=lambda output, target: of_each_place(output, target).mean()),
    ),
}


# Lists of samples, and what is outside of the model -----------------------------------------------------------------


class OfBags(nn.Module):
    def __init__(self, join: Any) -> None:
        super().__init__()
        self.join, self.pool = join, Part(lambda self, bags: torch.stack([self.fc(bag).mean(0) for bag in bags]))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, bags: Any, there: Tensor | None = None) -> Tensor:
        return self.last(self.join(self.pool, bags, there))


def in_the_model(pool: Part, bags: Any, there: Tensor | None) -> Tensor:
    return torch.stack([pool.fc(bag).mean(0) for bag in bags])


def in_a_submodule(pool: Part, bags: Any, there: Tensor | None) -> Tensor:
    return pool(bags)


def padded(pool: Part, bags: Any, there: Tensor) -> Tensor:
    return (pool.fc(bags) * there[..., None]).sum(1) / there.sum(1, keepdim=True)


class TypeOfBags(OfBags):
    def forward(self, bags: Any, there: Tensor | None = None) -> Tensor:
        bags = bags if type(bags) is list else [bags]
        return self.last(self.pool(bags))


class InstanceOfBags(OfBags):
    def forward(self, bags: Any, there: Tensor | None = None) -> Tensor:
        bags = bags if isinstance(bags, list) else [bags]
        return self.last(self.pool(bags))


def normed_outside(self: Net, h: Tensor) -> Tensor:
    return self.last(NORM(h) * 0 + h)


HELD = {"mean": torch.zeros(3, dtype=torch.float64)}


def with_mean(output: Tensor, target: Tensor) -> Tensor:
    loss = F.mse_loss(output, target)
    HELD["mean"] = HELD["mean"] * 0.9 + loss.detach() * 0.1
    return loss


class WithMean:
    def __init__(self) -> None:
        self.mean = torch.zeros(3, dtype=torch.float64)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output, target)
        self.mean = self.mean * 0.9 + loss.detach() * 0.1
        return loss


class Normed(Net):
    def __init__(self) -> None:
        super().__init__(join=lambda self, h: self.last(self.norm(h) * 0 + h))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)


ITEMS = {"batch_dim": {"bags": "items"}}
SAID = ("is kept whole", "it looks into a list whose items are the samples")
OUTSIDE = {
    "list, submodule": Case(
        (*SAID, "let a submodule of its own"),
        Step(partial(OfBags, in_the_model), x=BAGS, options=ITEMS),
        Step(partial(OfBags, in_a_submodule), x=BAGS, options=ITEMS),
        kept=True,
    ),
    "list, padded": Case(
        (*SAID, "or pass one tensor, padded, in place of the list"),
        Step(partial(OfBags, in_the_model), x=BAGS, options=ITEMS),
        Step(partial(OfBags, padded), (THERE,), x=PADDED),
    ),
    "type of list": Case(
        ("TypeOfBags is kept whole", "write isinstance(bags, list)"),
        Step(partial(TypeOfBags, None), x=BAGS, options=ITEMS),
        Step(partial(InstanceOfBags, None), x=BAGS, options=ITEMS),
        kept=True,
    ),
    "global": Case(
        ("writes into a tensor that it reaches by a global variable", "the module that has it as a submodule"),
        Step(partial(Net, join=normed_outside)),
        Step(Normed),
    ),
    "global, set": Case(
        ("by a global variable or a closure", "in an attribute of the model, or of the object"),
        Step(loss_fn=with_mean),
        Step(loss_fn=WithMean()),
        line=False,
    ),
}


SLOW = ("list, submodule", "type of list", "global, set", "kept, traced", "of each place", "dict")


@cases(LOSS | OUTSIDE, SLOW)
def test_what_a_message_says_to_write(case: Case) -> None:
    check(case, Path(__file__).name)
