"""What a stage with selective recomputation keeps; that gradients stay the model's is tested in tests/whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.ir.program.backward import Backward, halves
from fxpipe.ir.program.kept_bytes import kept_bytes, size
from fxpipe.ir.program.program import Program
from tests.helpers.coded_programs import coded


class Net(nn.Module):
    """Two linear layers, with the ops of a subclass between them."""

    width = 32

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, self.width), nn.BatchNorm1d(self.width), nn.Linear(self.width, 8)

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class Gelu(Net):
    def between(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class LongChain(Net):
    def between(self, x: Tensor) -> Tensor:
        return torch.sigmoid(F.gelu(x.view(-1, 4, 8).transpose(1, 2)) * 2.0).exp().flatten(1)


class Dropout(Net):
    def between(self, x: Tensor) -> Tensor:
        return F.dropout(F.gelu(x), 0.5)


class Constant(Net):
    """Views and reads a tensor that is made of a number."""

    def between(self, x: Tensor) -> Tensor:
        return F.gelu(x) * torch.tensor([3.0], dtype=x.dtype).expand(self.width)


class InPlace(Net):
    def between(self, x: Tensor) -> Tensor:
        return torch.sin(F.gelu(x).mul_(3.0))


class Statistics(Net):
    def between(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(x))


class Product(Net):
    def between(self, x: Tensor) -> Tensor:
        rows = x.unsqueeze(1)
        return F.gelu(rows.transpose(1, 2) @ rows @ x.unsqueeze(2)).squeeze(2)


class Sum(Net):
    """The sum of a row is small: to keep it is better than to read the row again."""

    width = 256

    def between(self, x: Tensor) -> Tensor:
        return x * x.exp().sum(1, keepdim=True)


ROWS = 6


def of(kind: type[Net], checkpoint: str = "selective") -> tuple[Program, Backward, int]:
    """The program of one stage, its backward, and the bytes that it keeps of a micro-batch."""
    program = coded(kind().double(), torch.randn(2 * ROWS, 8, dtype=torch.float64), checkpoint=checkpoint)
    found = program.stages[0].backward
    assert found is not None, program.stages[0].autograd_because
    (kept,) = kept_bytes(program, {"b": ROWS})
    assert kept is not None
    return program, found, size(kept.saved)


WIDE, SMALL = ROWS * 32 * 8, 3 * ROWS * 8 * 8  # bytes: between the layers; and of input, output, target


@pytest.mark.parametrize(
    ("kind", "never", "selective"), [(Gelu, 2 * WIDE, WIDE), (LongChain, 4 * WIDE, WIDE), (Dropout, 3 * WIDE, 2 * WIDE)]
)
def test_between_two_products_one_value_is_kept(kind: type[Net], never: int, selective: int) -> None:
    assert of(kind, "never")[2] == never + SMALL
    assert of(kind)[2] == selective + SMALL


@pytest.mark.parametrize("kind", [Gelu, LongChain, Dropout, Constant, InPlace, Statistics, Product, Sum])
def test_nothing_expensive_random_or_that_writes_runs_again(kind: type[Net]) -> None:
    program, backward, kept = of(kind)
    assert kept <= of(kind, "never")[2]
    again = [op for op in backward.ops if op.name in backward.recomputed]
    names = {str(getattr(op.target, "__name__", op.target)) for op in again}
    assert names.isdisjoint({"mm", "addmm", "linear", "bernoulli_", "native_batch_norm", "mul_", "sum", "empty_like"})
    assert not any(op.writes or op.random for op in again)
    assert backward.recomputed or kind is Sum
    assert backward.repeats.keys() <= {op.name for op in program.graph.ops}


def test_a_value_that_both_halves_need_is_handed_or_computed_in_both() -> None:
    """No half reads what it does not have, and what is handed on is no more than if nothing ran again."""
    handed = {}
    for mode in ("never", "selective"):
        program = coded(LongChain().double(), torch.randn(2 * ROWS, 8, dtype=torch.float64), 1, mode)
        backward = program.stages[1].backward
        assert backward is not None
        parts = halves(backward, program.types)
        for ops, known in ((parts.first, {*backward.keeps, *backward.arriving}), (parts.second, {*parts.hands})):
            known |= {*program.stages[1].states, "b"}
            for op in ops:
                assert known.issuperset(op.reads)
                known.add(op.name)
        (_, kept) = kept_bytes(program, {"b": ROWS})
        assert kept is not None
        handed[mode] = size(kept.handed)
    assert handed["selective"] <= handed["never"]


def test_what_keeps_autograd_recomputes_all_but_the_last() -> None:
    class Strided(Net):
        def between(self, x: Tensor) -> Tensor:
            return x.as_strided(x.shape, x.stride())

    program = coded(Strided(), torch.randn(6, 8), checkpoint="selective")
    assert program.stages[0].checkpoint == "except_last"
