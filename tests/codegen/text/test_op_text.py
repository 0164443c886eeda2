"""The text of an op computes what the op does, and reads as a person would have written it."""

import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpipe.codegen.text.line_layout import flat
from fxpipe.codegen.text.op_text import EmitError, expression, modules
from fxpipe.codegen.text.signatures import _FUNCTIONS, REQUIRED, _parse
from fxpipe.ir.graph.graph import Op, Origin, Ref, map_refs
from fxpipe.ir.graph.value_types import TensorType
from fxpipe.ir.program.program import OWN_DEVICE

torch.manual_seed(0)
VALUES: dict[str, Any] = {
    "x": torch.rand(2, 4, 6, 6), "y": torch.rand(2, 4, 6, 6), "w": torch.rand(4, 4, 3, 3), "g": torch.rand(4),
    "mean": torch.zeros(4), "var": torch.ones(4), "v": torch.rand(3), "m": torch.rand(3, 3),
    "ids": torch.tensor([0, 2]),
    "mask": torch.tensor([True, False, True]), "n": 3, "rows": torch.rand(2, 5, 4), "h": torch.zeros(1, 2, 3),
    "c": torch.zeros(1, 2, 3), "wi": torch.rand(12, 4), "wh": torch.rand(12, 3), "bi": torch.rand(12),
}  # fmt: skip
R = Ref
x, y, w, g, mean, var, v, m, ids, mask, n, rows = map(
    Ref, ("x", "y", "w", "g", "mean", "var", "v", "m", "ids", "mask", "n", "rows")
)


def op(target: Any, *args: Any, writes: tuple[str, ...] = (), **kwargs: Any) -> Op:
    origin = Origin("/home/someone/net.py", 7, "y = self(x)", "")
    return Op("result", target, args, kwargs, TensorType("f32", ("b",), "cpu"), origin, writes=writes)


CASES: list[tuple[Op, str]] = [
    # operators
    (op(operator.add, x, y), "x + y"),
    (op(operator.sub, 1, v), "1 - v"),
    (op(operator.matmul, m, v), "m @ v"),
    (op(operator.neg, v), "-v"),
    (op(operator.neg, -2), "-(-2)"),
    (op(operator.invert, mask), "~mask"),
    (op(operator.pow, v, 2), "v**2"),
    (op(operator.pow, -2, n), "(-2) ** n"),
    (op(operator.lt, 0, v), "v > 0"),
    (op(operator.eq, v, 0.5), "v == 0.5"),
    (op(operator.eq, mask, True), "operator.eq(mask, True)"),
    (op(operator.is_, v, None), "v is None"),
    (op(operator.iadd, n, 1), "n + 1"),
    (op(operator.add, (1,), (2,)), "operator.add((1,), (2,))"),
    (op(operator.floordiv, n, 2), "n // 2"),
    (op(math.sqrt, n), "math.sqrt(n)"),
    (op(float, n), "float(n)"),
    # items and attributes
    (op(operator.getitem, x, 0), "x[0]"),
    (op(operator.getitem, x, (Ellipsis, slice(None, n), None)), "x[..., :n, None]"),
    (op(operator.getitem, x, (slice(None), slice(1, None, 2))), "x[:, 1::2]"),
    (op(operator.getitem, x, (0,)), "x[0]"),
    (op(operator.getitem, x, ()), "x[()]"),
    (op(operator.getitem, v, [0, 2]), "v[[0, 2]]"),
    (op(operator.getitem, v, (ids,)), "v[ids,]"),
    (op(operator.getitem, v, -1), "v[-1]"),
    (op(getattr, x, "shape"), "x.shape"),
    # torch.nn.functional
    (op(torch.conv2d, x, w, None, (1, 1), (1, 1), (1, 1), 1), "F.conv2d(x, w, padding=1)"),
    (op(torch.conv2d, x, w, g, (2, 1)), "F.conv2d(x, w, g, stride=(2, 1))"),
    (op(F.max_pool2d, x, 2, 2, 0, 1, ceil_mode=False, return_indices=False), "F.max_pool2d(x, 2)"),
    (op(F.max_pool2d, x, 3, 2, 1), "F.max_pool2d(x, 3, stride=2, padding=1)"),
    (op(F.avg_pool2d, x, (2, 2), (2, 2), 0, False, True, None), "F.avg_pool2d(x, 2)"),
    (
        op(F.batch_norm, x, mean, var, weight=g, bias=g, training=True, momentum=0.1, eps=1e-05),
        "F.batch_norm(x, mean, var, g, g, training=True)",
    ),
    (op(F.batch_norm, x, None, None, g, g, True), "F.batch_norm("
     "x, running_mean=None, running_var=None, weight=g, bias=g, training=True)"),
    (op(F.dropout, x, 0.0, True, False), "F.dropout(x, p=0.0)"),
    (op(F.dropout, x, 0.5, False, False), "F.dropout(x, training=False)"),
    (op(F.relu, x, inplace=False), "F.relu(x)"),
    (op(torch._C._nn.linear, v, m, None), "F.linear(v, m)"),
    (op(F.interpolate, x, None, 2.0, "nearest", None), "F.interpolate(x, scale_factor=2.0)"),
    (op(F.layer_norm, rows, (4,), g, g, 1e-05), "F.layer_norm(rows, (4,), g, g)"),
    (op(F.layer_norm, rows, (4,), None, None, 1e-06), "F.layer_norm(rows, (4,), eps=1e-06)"),
    (op(F.softmax, v, -1, _stacklevel=5), "F.softmax(v, dim=-1)"),
    (op(F.embedding, ids, m, None, None, 2.0, False, False), "F.embedding(ids, m)"),
    (op(F.scaled_dot_product_attention, x, y, x, attn_mask=None, dropout_p=0.0, is_causal=True),
     "F.scaled_dot_product_attention(x, y, x, is_causal=True)"),
    (op(F.gelu, v, approximate="none"), "F.gelu(v)"),
    (op(F.gelu, v, approximate="tanh"), 'F.gelu(v, approximate="tanh")'),
    (op(F.adaptive_avg_pool2d, x, (1, 1)), "F.adaptive_avg_pool2d(x, (1, 1))"),
    (op(torch._C._nn.pad, x, (0, 1, 0, 1), "constant", None), "F.pad(x, (0, 1, 0, 1))"),
    # torch
    (op(torch.cat, [x, y], dim=1), "torch.cat([x, y], dim=1)"),
    (op(torch.cat, [x, y], 0), "torch.cat([x, y])"),
    (op(torch.flatten, x, 1), "torch.flatten(x, start_dim=1)"),
    (op(torch.max, x, 1), "torch.max(x, dim=1)"),
    (op(torch.max, x, y), "torch.max(x, y)"),
    (op(torch.sum, x, (1, 2), True), "torch.sum(x, dim=(1, 2), keepdim=True)"),
    (op(torch.where, mask, v, float("-inf")), 'torch.where(mask, v, float("-inf"))'),
    (op(torch.arange, 0, n, dtype=torch.int64), "torch.arange(0, n, dtype=torch.int64)"),
    (op(torch.ops.aten.add.Tensor, v, 1), "torch.ops.aten.add.Tensor(v, 1)"),
    (
        op(torch.lstm, rows, (R("h"), R("c")), [R("wi"), R("wh"), R("bi"), R("bi")], True, 1, 0.0, True, False, True),
        "torch.lstm(rows, (h, c), [wi, wh, bi, bi], has_biases=True, num_layers=1, dropout=0.0, train=True, "
        "bidirectional=False, batch_first=True)",
    ),
    # methods
    (op("view", x, 2, -1), "x.view(2, -1)"),
    (op("sum", x, 1, True), "x.sum(dim=1, keepdim=True)"),
    (op("max", x, y), "x.max(y)"),
    (op("transpose", x, 1, 2), "x.transpose(1, 2)"),
    (op("to", v, dtype=torch.float64), "v.to(dtype=torch.float64)"),
    (op("masked_fill", v, mask, 0.0), "v.masked_fill(mask, 0.0)"),
    (op("clamp", v, 0.2, 0.8), "v.clamp(min=0.2, max=0.8)"),
    (op("flatten", x, 1, -1), "x.flatten(start_dim=1)"),
]  # fmt: skip


def direct(item: Op) -> Any:
    """What the op computes, without any text."""
    args, kwargs = map_refs((item.args, dict(item.kwargs)), lambda ref: VALUES[ref.name])
    if isinstance(item.target, str):
        return getattr(args[0], item.target)(*args[1:], **kwargs)
    return item.target(*args, **kwargs)


@pytest.mark.parametrize(("item", "text"), CASES, ids=[text for _, text in CASES])
def test_text_and_value(item: Op, text: str) -> None:
    assert flat(expression(item, str)) == text
    imported = {"F": F} | {name: __import__(name) for name in modules(item) if "." not in name}
    torch.manual_seed(1)
    found = eval(text, {**VALUES, **imported})
    torch.manual_seed(1)
    same(found, direct(item))


def same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, tuple):
        for left, right in zip(a, b, strict=True):
            same(left, right)
    else:
        assert a == b


def test_own_device() -> None:
    assert flat(expression(op(torch.zeros, n, device=OWN_DEVICE), str)) == "torch.zeros(n, device=self.device)"


def test_keywords_that_are_no_names() -> None:
    assert flat(expression(op("f", v, **{"a": 1, "from": 2, "a-b": 3}), str)) == 'v.f(a=1, **{"from": 2, "a-b": 3})'
    assert flat(expression(op(dict, **{"a": v, "from": 2}), str)) == '{"a": v, "from": 2}'


def test_modules() -> None:
    assert modules(op(operator.add, x, y)) == set()
    assert modules(op(operator.eq, x, None)) == {"operator"}
    assert modules(op(F.relu, x)) == {"torch.nn.functional"}
    assert modules(op("to", x, torch.float32)) == {"torch"}


def test_what_cannot_be_written_names_the_line() -> None:
    for item in (op(lambda x: x, x), op(torch.add, x, torch.ones(1))):
        with pytest.raises(EmitError, match=r"cannot write the op 'result', at net\.py:7  y = self"):
            expression(item, str)


SAMPLES: dict[str, tuple[Any, ...]] = {
    "F.linear": (torch.rand(2, 3), torch.rand(4, 3)),
    "F.bilinear": (torch.rand(2, 3), torch.rand(2, 3), torch.rand(4, 3, 3)),
    "F.pixel_shuffle": (torch.rand(1, 4, 2, 2), 2),
    "F.one_hot": (torch.tensor([0, 1]), 3),
    "F.gelu": (torch.rand(3),),
    "F.pad": (torch.rand(3), (0, 1)),
    "F.scaled_dot_product_attention": (torch.rand(1, 2, 3, 4),) * 3,
    "torch.transpose": (torch.rand(2, 3), 0, 1),
    "torch.chunk": (torch.rand(4, 3), 2),
    "torch.clamp": (torch.rand(3), 0.2),
    "torch.flatten": (torch.rand(2, 3),),
    "torch.tril": (torch.rand(3, 3),),
    "torch.triu": (torch.rand(3, 3),),
}


def sample(name: str) -> tuple[Any, ...]:
    """Arguments that the function accepts, for what has no default."""
    if name in SAMPLES:
        return SAMPLES[name]
    dims = int(name[-2]) if name[-2:-1].isdigit() else 0
    if "conv" in name:
        return (torch.rand(1, 2, *[5] * dims), torch.rand(2, 2, *[3] * dims))
    if "pool" in name:
        return (torch.rand(1, 2, *[5] * dims), 2)
    if name in ("torch.cat", "torch.concat", "torch.stack"):
        return ([torch.rand(2), torch.rand(2)],)
    return (torch.rand(2, 3), 1)


@pytest.mark.parametrize("name", [name for name in _FUNCTIONS if "rnn" not in name and name[-3:] not in ("gru", "stm")])
def test_the_names_and_defaults_that_we_know_are_torchs(name: str) -> None:
    signature = _parse(_FUNCTIONS[name])
    function = eval(name, {"torch": torch, "F": F})
    required = sample(name)
    named = {key: default for key, default in signature[len(required) :] if default is not REQUIRED}
    same(function(*required, **named), function(*required))
    by_name = {key: value for (key, _), value in zip(signature[1:], required[1:], strict=False)}
    same(function(required[0], **by_name), function(*required))
