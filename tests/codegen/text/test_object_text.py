"""Objects as source: literals evaluate to themselves, functions have their public name."""

import enum
import math
import operator
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.codegen.text.line_layout import flat
from fxpipe.codegen.text.object_text import literal, modules_of, spell
from fxpipe.ir.program.program import OWN_DEVICE

Point = namedtuple("Point", "x y")


class Mode(enum.Enum):
    FAST = "fast"


def evaluate(value: Any) -> Any:
    return eval(flat(literal(value)), {"torch": torch, "F": F, "math": math, __name__.partition(".")[0]: _top()})


def _top() -> Any:
    import sys

    return sys.modules[__name__.partition(".")[0]]


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from([..., torch.float32, torch.bfloat16, torch.channels_last, torch.strided, torch.device("cuda:1")])
    | st.sampled_from([torch.Size([2, 3]), torch.Size([]), range(3), int, torch.Tensor, F.relu, math.sqrt])
)
keys = st.text() | st.integers() | st.booleans()


def nests(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    slices = st.builds(slice, items, items, items)
    return st.lists(items) | st.lists(items).map(tuple) | st.dictionaries(keys, items) | slices


@given(st.recursive(leaves, nests, max_leaves=10))
def test_literals_come_back(value: Any) -> None:
    assert_same(evaluate(value), value)


def assert_same(a: Any, b: Any) -> None:
    """Equal, of one type, with signed zeros and nan told apart."""
    assert type(a) is type(b)
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, dict):
        assert_same(list(a), list(b))
        assert_same(list(a.values()), list(b.values()))
    elif isinstance(a, slice):
        assert_same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    elif isinstance(a, float):
        assert (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    elif isinstance(a, complex):
        assert_same((a.real, a.imag), (b.real, b.imag))
    else:
        assert a == b


def test_sets_are_sorted() -> None:
    assert flat(literal({3, 1, 2})) == "{1, 2, 3}"
    assert flat(literal(frozenset())) == "frozenset()"


def test_numbers_that_nobody_knows_by_heart() -> None:
    assert flat(literal(torch.finfo(torch.float32).min)) == "torch.finfo(torch.float32).min"
    assert flat(literal(1e38)) == "1e38"
    assert set(modules_of([-65504.0])) == {"torch"}


def test_own_device() -> None:
    assert flat(literal(OWN_DEVICE)) == "self.device"


def test_classes_of_the_user() -> None:
    module = __name__
    assert flat(literal(Mode.FAST)) == f"{module}.Mode.FAST"
    assert flat(literal(Point(1, 2))) == f"{module}.Point(x=1, y=2)"


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (torch._C._nn.linear, "F.linear"),
        (torch._C._nn.gelu, "F.gelu"),
        (F.scaled_dot_product_attention, "F.scaled_dot_product_attention"),
        (F.max_pool2d, "F.max_pool2d"),
        (torch.conv2d, "F.conv2d"),
        (torch.relu, "torch.relu"),
        (torch.fft.fft, "torch.fft.fft"),
        (torch.special.expit, "torch.special.expit"),
        (torch.linalg.norm, "torch.linalg.norm"),
        (torch.ops.aten.add.Tensor, "torch.ops.aten.add.Tensor"),
        (torch.ops.aten.add, "torch.ops.aten.add"),
        (torch.Tensor.add, "torch.Tensor.add"),
        (math.floor, "math.floor"),
        (operator.index, "operator.index"),
        (int, "int"),
        (max, "max"),
    ],
)
def test_public_names(target: Any, text: str) -> None:
    assert spell(target).text == text
    assert eval(text, {"torch": torch, "F": F, "math": math, "operator": operator}) is target


def test_no_name() -> None:
    def inner() -> None: ...

    @dataclass
    class Local:
        x: int

    for item in (lambda x: x, inner, Local):
        with pytest.raises(ValueError, match="cannot be imported by its name; define it at the top level"):
            spell(item)
    with pytest.raises(ValueError, match="a Tensor cannot be written as a literal"):
        literal(torch.ones(2))
    with pytest.raises(ValueError, match="a object cannot be written"):
        literal(object())
