"""Numbers that come out of a computation are written as that computation, to the last bit."""

import math
import operator
import struct

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fxpipe.capture import capture
from fxpipe.codegen.text.line_layout import flat
from fxpipe.codegen.text.number_text import module_of, number
from fxpipe.codegen.text.op_text import expression, modules
from fxpipe.ir.graph.graph import Op, Origin, Ref
from fxpipe.ir.graph.value_types import TensorType

HERE = Origin("net.py", 1, "x", "")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8**-0.5, "8**-0.5"),
        (-(512**0.5), "-512**0.5"),
        (math.log(16), "math.log(16)"),
        (-math.log(10000) / 3, "-(math.log(10000) / 3)"),
        (math.sqrt(2 / math.pi), "math.sqrt(2 / math.pi)"),
        (-2 * math.pi, "-(2 * math.pi)"),
        (math.pi / 2, "(math.pi / 2)"),
        (1 / 17, "(1 / 17)"),
        (0.125, "0.125"),
        (0.044715, "0.044715"),
        (1e-05, "1e-05"),
        (torch.finfo(torch.float16).min, "torch.finfo(torch.float16).min"),
        (0.12345678901234, "0.12345678901234"),
    ],
)
def test_where_numbers_come_from(value, text):
    assert number(value) == text
    modules = {"math": math, "torch": torch}
    assert eval(text, {name: modules[name] for name in filter(None, [module_of(value)])}) == value


@given(st.one_of(st.floats(), st.integers(2, 4096).map(lambda n: n**-0.5), st.integers(2, 4096).map(lambda n: 1 / n)))
def test_the_number_is_the_same_to_the_last_bit(value):
    found = eval(number(value), {"math": math, "torch": torch, "float": float})
    assert struct.pack("d", found) == struct.pack("d", value) or math.isnan(value)


@pytest.mark.parametrize("value", [8**-0.5, -(8**-0.5), 1 / 17, math.log(16), -math.log(10000) / 3])
@pytest.mark.parametrize("sign", ["add", "sub", "mul", "truediv", "pow", "mod"])
@pytest.mark.parametrize("first", [True, False])
def test_beside_an_operator_it_is_one_number(value, sign, first):
    target, x = getattr(operator, sign), 2.5
    args = (value, Ref("x")) if first else (Ref("x"), value)
    op = Op("y", target, args, {}, TensorType("f32", (), "cpu"), HERE)
    found = eval(flat(expression(op, str)), {"math": math, "x": x})
    assert found == (target(value, x) if first else target(x, value))
    assert ("math" in modules(op)) == (module_of(value) == "math")


def test_the_scale_of_attention():
    class Attention(torch.nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q, scale=q.shape[-1] ** -0.5)

    (op,) = [op for op in capture(Attention(), (torch.ones(2, 3, 4, 6),)).ops if "scaled" in str(op.target)]
    assert "scale=6**-0.5" in flat(expression(op, str))
