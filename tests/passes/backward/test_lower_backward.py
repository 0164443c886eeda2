"""What a stage's backward looks like as ops; that it computes the right gradients is tested in tests/whole."""

from __future__ import annotations

import copy
import operator
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fxpipe
from fxpipe.ir.graph.graph import called
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.program.backward import Backward, halves
from fxpipe.ir.program.program import OWN_DEVICE, Program
from fxpipe.passes.backward.tracing.fake_sizes import Sizes
from tests.helpers.coded_programs import coded


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).as_strided((len(x), 2), (2, 1))  # type: ignore[no-any-return]


def backward_of(program: Program, stage: int = 0) -> Backward:
    found = program.stages[stage].backward
    assert found is not None, program.stages[stage].autograd_because
    return found


def test_forward_stays_as_it_was_written_and_keeps_what_backward_reads() -> None:
    program = coded(Chain(), torch.randn(6, 4))
    stage, backward = program.stages[0], backward_of(program)
    assert [called(op) for op in stage.ops] == ["linear", "tanh", "linear", "mse_loss"]
    assert set(backward.keeps) == {"x", "tanh", "output", "target"}
    assert dict(backward.weights).keys() == {"first_weight", "first_bias", "second_weight", "second_bias"}


def test_gradients_are_called_by_their_values() -> None:
    program = coded(Chain(), torch.randn(6, 4), cut=2)
    later = backward_of(program, 1)
    assert later.takes == (("tanh", "dtanh"),)
    assert later.roots == (("loss", "dloss"),)
    assert dict(later.weights)["second_bias"] == "dsecond_bias"
    assert backward_of(program).roots == (("tanh", "dtanh"),)


def test_each_op_of_backward_has_the_line_of_its_op_of_forward() -> None:
    program = coded(Chain(), torch.randn(6, 4))
    codes = {op.origin.code for op in backward_of(program).ops if op.origin.line}
    assert codes == {"return self.second(torch.tanh(self.first(x)))"}


def test_the_halves_split_what_takes_wait_for_from_what_weights_wait_for() -> None:
    program = coded(Chain(), torch.randn(6, 4), cut=2)
    backward = backward_of(program, 1)
    parts = halves(backward, program.types)
    assert sorted(op.name for op in (*parts.first, *parts.second)) == sorted(op.name for op in backward.ops)
    assert "dtanh" in {op.name for op in parts.first}
    assert {"dsecond_weight", "dsecond_bias"} <= {op.name for op in parts.second}
    known = {*parts.hands, *(state for state in program.stages[1].states)}
    for op in parts.second:
        assert set(op.reads) <= known
        known.add(op.name)


def test_what_cannot_be_traced_keeps_autograd_and_says_why() -> None:
    stage = coded(Strided(), torch.randn(6, 4)).stages[0]
    assert stage.backward is None
    assert "as_strided" in stage.autograd_because
    assert "test_lower_backward.py" in stage.autograd_because


class Biases(nn.Module):
    """Sums over samples of each kind: for a row, for a table of one row, and for one tensor that is used as both."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.table, self.both = (nn.Parameter(torch.rand(shape)) for shape in ((4,), (1, 4), (1, 4)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x + self.row) * torch.cos(x + self.table) + x * self.both + torch.tanh(x + self.both.view(4))


def test_a_gradient_is_summed_in_the_shape_of_its_weight() -> None:
    program = coded(Biases(), torch.randn(6, 4))
    backward = backward_of(program)
    sums = [op.args[1:] for op in backward.ops if op.target == "sum"]
    assert sorted(map(str, sums)) == ["(0,)", "([0], True)", "([0], True)", "([0], True)"]
    for weight, gradient in backward.weights:
        assert getattr(program.types[gradient], "shape", ()) == getattr(program.types[weight], "shape", None)


class Factories(nn.Module):
    """Makes tensors on the device of its input, as its backward does too, and one of a list of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x) + torch.zeros(4, device=x.device)
        return torch.cat(
            [x[:, [0, 2]], torch.cumsum(x, 1), x.index_fill(1, torch.tensor([1], device=x.device), 2.0)], 1
        )


def test_a_stage_makes_tensors_on_its_own_device() -> None:
    """A replica of the stage is on another device than the one on which it was traced."""
    program = coded(Factories(), torch.randn(6, 4))
    stage, backward = program.stages[0], backward_of(program)
    given = [leaf for op in (*stage.ops, *backward.ops) for leaf in pytree.tree_leaves((op.args, dict(op.kwargs)))]
    assert OWN_DEVICE in given
    assert not [leaf for leaf in given if isinstance(leaf, torch.device)]


class Scaled(nn.Module):
    """Divides by the root of the mean of squares, as RMSNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


def test_what_an_expand_only_repeats_is_computed_once() -> None:
    program = coded(Scaled(), torch.randn(6, 4))
    backward = backward_of(program)
    assert "expand" not in [op.target for op in backward.ops]
    assert [op.args[1] for op in backward.ops if op.target is operator.pow] == [3]
    (part,) = [op for op in backward.ops if op.target is operator.truediv]
    assert isinstance(part.type, TensorType)
    assert (part.type.shape, backward.memory[part.name]) == (("b", 1), (part.name, "4*b"))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).mean(-1, keepdim=True)


def test_an_expand_stays_where_other_ops_need_it() -> None:
    """A matrix product of it, which may read memory in another order."""
    backward = backward_of(coded(Pooled(), torch.randn(6, 4)))
    assert [op.target for op in backward.ops].count("expand") == 1


@pytest.mark.parametrize(
    ("condition", "fixed"),
    [("b == 1 or (16*b) == (b*seq)", {"seq": 16}), ("seq % 8 == 0", {}), ("seq == 5", {"seq": 5}), ("seq < 40", {})],
)
def test_a_size_that_conditions_leave_no_choice_is_a_number(condition: str, fixed: dict[str, int]) -> None:
    sizes = Sizes(("b", "seq"), (), conditions=(condition,))
    assert sizes.fixed == fixed
    assert {*sizes.primes, *sizes.fixed} == {"b", "seq"}
    assert sizes.marks == sizes.primes


@pytest.mark.parametrize("turn", [0, 1])
def test_where_no_prime_fits_a_number_does_by_which_no_size_is_recognised(turn: int) -> None:
    conditions = "seq < 40", "other == seq"
    sizes = Sizes(("b", "seq", "other"), range(2, 50), turn, conditions=conditions, fitting=True)
    assert sizes.primes["seq"] == (31, 29)[turn]
    assert sizes.marks.keys() == {"b"}
    assert sizes.equal == {"other": "seq"}


class Counting(nn.Module):
    """A table of 40 rows, and an op with each number up to 40, so that no prime is left for the length."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.randn(40, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.table[: x.shape[1]]
        for number in range(2, 41):
            h = h + h[..., :1] / number
        return self.head(h)


def test_a_length_for_which_no_prime_fits_is_no_reason_for_autograd() -> None:
    torch.manual_seed(0)
    model = Counting().double()
    twin = copy.deepcopy(model)
    with closing(fxpipe.compile(model, 2, 2)) as pipe:
        for length in (7, 40, 31):
            x, y = torch.randn(2, 4, length, 4, dtype=torch.float64)
            pipe.step(x, target=y, loss_fn=F.mse_loss)
            F.mse_loss(twin(x), y).backward()
            for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
            assert "by autograd" not in pipe.explain()
