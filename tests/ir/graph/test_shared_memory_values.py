"""Which values may be the same memory: the table is complete, and groups are found."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxpipe.ir.graph.graph import Op, Origin, Ref
from fxpipe.ir.graph.shared_memory_values import MAY_VIEW, MAY_VIEW_ALL, known, memory, shares, viewed
from fxpipe.ir.graph.value_types import ScalarType, TensorType, TupleType, ValueType

ROW, PAIR = TensorType("f32", ("b", 4), "cpu"), TensorType("f32", (4,), "cpu")


def op(name: str, target: Any, *args: Any, writes: tuple[str, ...] = (), type: ValueType = ROW, **kwargs: Any) -> Op:
    return Op(name, target, args, kwargs, type, Origin("net.py", 1, name, ""), (), writes)


X, Y = Ref("x"), Ref("y")


def test_every_view_that_torch_declares_is_in_the_table() -> None:
    schemas = torch._C._jit_get_all_schemas()
    views = {
        schema.name.removeprefix("aten::")
        for schema in schemas
        if schema.name.startswith("aten::")
        if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns)
    }
    # Of TorchScript's own containers and of nested, sparse or forward-mode tensors: nothing that a model calls.
    inner = {"get", "keys", "pop", "setdefault", "local_value", "to_here", "slice_inverse"}
    missing = {name for name in views - inner if not name.startswith("_")} - MAY_VIEW
    assert missing == set()


@pytest.mark.parametrize(
    "call", [lambda x: F.dropout(x, 0.5, False), lambda x: x.float(), lambda x: torch.einsum("ij->ji", x)]
)
def test_the_table_has_the_views_that_torch_does_not_declare(call: Any) -> None:
    x = torch.rand(2, 3)
    assert call(x).data_ptr() == x.data_ptr()
    assert {"dropout", "float"} <= MAY_VIEW
    assert "einsum" in MAY_VIEW_ALL


def test_what_an_op_may_share() -> None:
    def of_the_user(x: torch.Tensor) -> torch.Tensor:
        return x

    assert shares(op("v", "view", X, Y)) == ("x",)
    assert shares(op("v", torch.reshape, X, (2, Y))) == ("x",)
    assert shares(op("v", operator.getitem, X, 0)) == ("x",)
    assert shares(op("v", torch.ops.aten.view.default, X, (2,))) == ("x",)
    assert shares(op("v", torch.reshape, input=X, shape=(2,))) == ("x",)
    assert shares(op("v", of_the_user, X, Y)) == ("x", "y")
    assert shares(op("v", F.relu, X)) == ()
    assert shares(op("v", torch.Tensor.add, X, Y)) == ()
    assert shares(op("v", "add", X, Y)) == ()
    assert known(torch._C._nn.linear)
    assert not known(of_the_user)


def test_groups() -> None:
    ops = [
        op("h", "add", X, Y),
        op("v", "view", Ref("h"), Ref("b")),
        op("parts", "chunk", Ref("v"), 2, type=TupleType((ROW, ROW))),
        op("left", operator.getitem, Ref("parts"), 0),
        op("right", "neg", Ref("left")),
        op("n", operator.getitem, Ref("shape"), 0, type=ScalarType("int")),
        op("sum", F.relu, Ref("right"), inplace=True, writes=("right",)),
        op("norm", F.batch_norm, X, Ref("mean"), writes=("mean",)),
        op("count_", "add_", Ref("count"), 1, writes=("count",), type=PAIR),
    ]
    types: dict[str, ValueType] = {"x": ROW, "y": ROW, "b": ScalarType("int"), "mean": PAIR, "count": PAIR}
    root = memory(ops, types | {op.name: op.type for op in ops} | {"shape": ROW})
    assert len({root(name) for name in ("h", "v", "parts", "left")}) == 1
    assert root("sum") == root("right")
    assert root("count_") == root("count")
    assert len({root(name) for name in ("x", "y", "h", "right", "norm", "mean", "count", "b", "n")}) == 9


HALF, INDEX = TensorType("f16", ("b", 4), "cpu"), TensorType("i64", ("b",), "cpu")
VIEWED = [
    (op("v", "view", X, -1), "x"), (op("v", "mT", X), "x"), (op("v", "getattr", X, "T"), "x"),
    (op("v", "to", X, torch.float32), "x"), (op("v", "to", X, torch.float16, type=HALF), None),
    (op("v", operator.getitem, X, 0), "x"), (op("v", operator.getitem, X, Ref("i")), None),
    (op("v", operator.getitem, Ref("pair"), Ref("i")), "pair"),
    (op("v", "unfold", X, 1, 2, 1), "x"), (op("v", F.unfold, X, 2), None),
    (op("v", F.dropout, X, 0.5, False), "x"), (op("v", F.dropout, X, 0.5), None),
    (op("v", F.feature_alpha_dropout, X, training=False), "x"), (op("v", F.relu, X), None),
]  # fmt: skip


@pytest.mark.parametrize(("view", "of"), VIEWED)
def test_what_a_view_is_of(view: Op, of: str | None) -> None:
    assert viewed(view, {"x": ROW, "i": INDEX, "pair": TupleType((ROW, ROW))}) == of
