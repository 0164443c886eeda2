"""What a message about a part kept whole, or a batch that is cut, says to write: it is written, and works."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.remedies import WIDTH, Case, Net, Part, Step, cases, check, refused

GIVEN = torch.rand(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
INNER = 1e9  # what no sum of these samples is


# Parts that are kept whole, and what calls them ---------------------------------------------------------------------


def looks(self: Part, h: Tensor, scale: Any = 1) -> Tensor:
    if h.sum() > INNER + self.fc.weight.sum():
        h = -h
    return self.fc(h) * scale


def writes(self: Part, h: Tensor) -> Tensor:
    if h.sum() < INNER + self.fc.weight.sum():
        h += 1
    return self.fc(h)


def adds(self: Part, h: Tensor) -> Tensor:
    if h.sum() < INNER + self.fc.weight.sum():
        h = h + 1
    return self.fc(h)


def returns_a_set(self: Part, h: Tensor) -> Any:
    return {looks(self, h)}


def may_return_what_it_gets(self: Part, h: Tensor) -> Tensor:
    return -h if h.sum() > INNER + self.fc.weight.sum() else h


def writes_into_its_result(self: Net, h: Tensor) -> Tensor:
    found = self.part(h)
    found += 1
    return self.last(found)


def adds_to_its_result(self: Net, h: Tensor) -> Tensor:
    found = self.part(h)
    found = found + 1
    return self.last(found)


def one_by_one(self: Net, h: Tensor) -> Tensor:
    return self.last(torch.stack([self.part(row[None])[0] for row in h]))


def by_samples(self: Part, h: Tensor) -> dict[str, Any]:
    h = self.fc(h)
    return {"all": h, "each": [row if row.sum() > INNER + self.fc.weight.sum() else 2 * row for row in h]}


def by_samples_in_one(self: Part, h: Tensor) -> Tensor:
    return torch.stack(by_samples(self, h)["each"])


def slope_of(outputs: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(outputs.sum(), of, create_graph=True)[0]


def slope_in_the_part(self: Part, h: Tensor) -> Tensor:
    h = h.detach().requires_grad_()
    return slope_of(self.fc(h).square(), h)


class Slopes(nn.Module):
    """Only its part takes the derivative of what is computed here."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.part, self.last = nn.Linear(WIDTH, WIDTH), Part(slope), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return self.last(self.part(self.fc(x).square(), x))


def slope(self: Part, outputs: Tensor, of: Tensor) -> Tensor:
    return slope_of(outputs, of)


def replaces(self: Part, h: Tensor) -> Tensor:
    self.fc.weight = nn.Parameter(F.normalize(self.fc.weight))
    return self.fc(h)


PART = {
    "writes": Case(
        ("Net is kept whole", "and part writes into what it is given", "write x = x + 1 in place of x += 1"),
        Step(partial(Net, writes, lambda self, h: self.last(self.part(2 * h)))),
        Step(partial(Net, adds, lambda self, h: self.last(self.part(2 * h)))),
        kept=True,
    ),
    "set": Case(
        ("Net is kept whole", "part returns a value that is no tensor", "return new tensors"),
        Step(partial(Net, returns_a_set, lambda self, h: self.last(self.part(h).pop()))),
        Step(partial(Net, looks)),
        kept=True,
    ),
    "number": Case(
        ("Net is kept whole", "is given what is no tensor", "give it tensors in place of numbers"),
        Step(partial(Net, looks, lambda self, h: self.last(self.part(h, self.first.weight.max().item())))),
        Step(partial(Net, looks, lambda self, h: self.last(self.part(h, self.first.weight.max().detach())))),
        kept=True,
    ),
    "result written": Case(
        ("writes into what part returns", "write y = y + 1 in place of y += 1"),
        Step(partial(Net, may_return_what_it_gets, writes_into_its_result)),
        Step(partial(Net, may_return_what_it_gets, adds_to_its_result)),
        kept=True,
    ),
    "one by one": Case(
        ("which way it goes", "call it once, with all"),
        Step(partial(Net, looks, one_by_one)),
        Step(partial(Net, looks)),
        kept=True,
    ),
    "list of results": Case(
        ("Net is kept whole", "looks into a list that a submodule kept whole returns", "return one tensor"),
        Step(partial(Net, by_samples, lambda self, h: self.last(torch.stack([*self.part(h)["each"]])))),
        Step(partial(Net, by_samples_in_one)),
        kept=True,
    ),
    "list of results, stacked": Case(
        ("Net is kept whole", "that a submodule kept whole returns", "tensor"),  # torch's refusals of it differ
        Step(partial(Net, by_samples, lambda self, h: self.last(torch.stack(self.part(h)["each"])))),
        Step(partial(Net, by_samples_in_one)),
        kept=True,
    ),
    "derivative": Case(
        ("Slopes is kept whole", "with respect to a tensor upstream of its own", "a submodule that computes both"),
        Step(Slopes),
        Step(partial(Net, slope_in_the_part)),
        kept=True,
    ),
}


# Batches and inputs -------------------------------------------------------------------------------------------------


def counts_up(self: Part, h: Tensor) -> Tensor:
    return torch.stack([self.fc(row) * number for number, row in enumerate(h)]) * 0 + self.fc(h)


def larger_if_many(self: Part, h: Tensor) -> Tensor:
    return self.fc(h) * (2 if h.shape[0] > 3 else 1)


def over_a_count(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum") * (1 / len(range(output.shape[0])))


def over_the_batch(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum") / output.shape[0]


def writes_into_the_input(self: Net, h: Tensor, more: Tensor, same: Tensor) -> Tensor:
    more += 1
    return self.last(h * more + same)


def writes_no_input(self: Net, h: Tensor, more: Tensor, same: Tensor) -> Tensor:
    more = more + 1
    return self.last(h * more + same)


def scaled(self: Net, h: Tensor, scale: Tensor) -> Tensor:
    return self.last(h * scale.view(1, WIDTH))


class WithDefault(Net):
    def forward(self, x: Tensor, scale: Tensor = GIVEN[:, :1]) -> Tensor:
        return self.last(self.first(x) * scale)


WHOLE = {"batch_dim": {"given[0]": None}}
BATCH = {
    "loop": Case(
        ("depending on the batch size", "write it as tensor operations over the whole batch"),
        Step(partial(Net, counts_up)),
        Step(partial(Net)),
    ),
    "if": Case(
        ("looks at the batch size", "for the whole batch of 4", "independent of the batch size"),
        Step(partial(Net, larger_if_many)),
        Step(),
    ),
    "if, uncut": Case(
        ("looks at the batch size", "or write chunks=1"),
        Step(partial(Net, larger_if_many)),
        Step(partial(Net, larger_if_many), options={"chunks": 1}),
    ),
    "count": Case(
        ("which is made of the batch size", "make it of x.shape[0], without int() or len()"),
        Step(loss_fn=over_a_count),
        Step(loss_fn=over_the_batch),
    ),
    "input written": Case(
        ("writes into the input given[0], which shares its memory with given[1]; write given_0 = given_0 + 1 in",),
        Step(partial(Net, join=writes_into_the_input), (GIVEN, GIVEN.view(WIDTH, 4))),
        Step(partial(Net, join=writes_no_input), (GIVEN, GIVEN.view(WIDTH, 4))),
    ),
    "no common size": Case(
        ("given[0]: 1 in dimension 0", "write batch_dim={'given[0]': None}"),
        Step(partial(Net, join=scaled), (GIVEN[:1],)),
        Step(partial(Net, join=scaled), (GIVEN[:1],), options=WHOLE),
        line=False,
    ),
    "no batch": Case(
        ("was taken for the batch", "If given[0] has no batch, write batch_dim={'given[0]': None}"),
        Step(partial(Net, join=scaled), (GIVEN[0],)),
        Step(partial(Net, join=scaled), (GIVEN[0],), options=WHOLE),
    ),
    "no dimension": Case(
        ("given[0] has 1 dimensions, so it cannot be cut along dimension 1", "batch_dim={'given[0]': None}"),
        Step(partial(Net, join=scaled), (GIVEN[0],), options={"batch_dim": {"given[0]": 1}}),
        Step(partial(Net, join=scaled), (GIVEN[0],), options=WHOLE),
        line=False,
    ),
    "batch of four": Case(
        ("does not run on 2", "write chunks=1"),
        Step(partial(Net, lambda self, h: self.fc(h).view(4, 2, 2).flatten(1))),
        Step(partial(Net, lambda self, h: self.fc(h).view(4, 2, 2).flatten(1)), options={"chunks": 1}),
    ),
    "default": Case(
        ("The default of scale", "pass it in the call, as in pipe(..., scale=scale)"),
        Step(WithDefault),
        Step(WithDefault, (GIVEN[:, :1],)),
    ),
}


SLOW = (
    "list of results, stacked", "number", "set", "result written", "derivative", "count", "one by one", "if, uncut",
    "no common size",
)  # fmt: skip


@cases(PART | BATCH, SLOW)
def test_what_a_message_says_to_write(case: Case) -> None:
    check(case, Path(__file__).name)


def test_a_parameter_that_a_part_kept_whole_replaces() -> None:
    """Its gradient would go to the new one."""
    with pytest.raises(
        RuntimeError, match=r"sets fc.weight to another parameter; compute with the other tensor itself"
    ):
        refused(Step(partial(Net, replaces)))
