"""What a layer is called with and returns, while Dynamo traces it: what tells that another call is traced alike."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import variables
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxpipe.capture.twins.equal_modules import literal

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Odd(Exception):
    """Something that is traced for each layer."""


def described(value: Any, items: list[Any]) -> Hashable:
    """What is known of an argument; the tensors and sizes in it are added to `items`. Raises Odd."""
    if isinstance(value, tuple):
        return tuple(described(item, items) for item in value)
    if isinstance(value, str):
        return value
    if isinstance(value, LazyVariableTracker):
        value = value.realize()
    if type(value) is variables.TensorVariable:
        items.append(value)
        return value.class_type, value.has_grad_fn, fake_kind(value.as_proxy().node)
    if type(value) is SymNodeVariable:
        items.append(value)
        return _size(value.sym_num)
    if type(value) is variables.TupleVariable:
        return "tuple", tuple(described(item, items) for item in value.items)
    if isinstance(value, variables.ConstantVariable):
        try:
            return "literal", literal(value.as_python_constant())
        except TypeError:
            raise Odd from None
    raise Odd


def fake_kind(node: fx.Node) -> Hashable:
    """All that a trace may ask of a value. Raises Odd if it is not a plain fake tensor, or a size."""
    value = node.meta.get("example_value")
    if isinstance(value, SYMBOLIC):
        return _size(value)
    kind = type(value)
    plain = kind is FakeTensor or (isinstance(value, FakeTensor) and kind is nn.Parameter)
    if not plain or value.layout != torch.strided or value.constant is not None or free_unbacked_symbols(value):  # type: ignore
        raise Odd
    try:
        flags = value.requires_grad, value.is_leaf, value.is_conj(), value.is_neg(), value.is_inference()  # type: ignore
    except RuntimeError:
        raise Odd from None
    numbers = (*value.shape, *value.stride(), value.storage_offset())  # type: ignore
    return kind, value.dtype, value.device, value.dim(), tuple(map(_size, numbers)), flags  # type: ignore


def _size(size: Any) -> Hashable:
    if not isinstance(size, SYMBOLIC):
        return type(size), size
    if free_unbacked_symbols(size):
        raise Odd
    return type(size), size.node.expr


@dataclass(frozen=True)
class Output:
    """A tensor that a layer made."""

    node: fx.Node
    value: Tensor
    named: bool


@dataclass(frozen=True)
class Given:
    """A tensor that a layer was given, by its place."""

    place: int


def returned(value: Any, given: list[fx.Node], made: set[fx.Node]) -> Any:
    """What a layer returned. Raises Odd for what cannot be made again."""
    if isinstance(value, LazyVariableTracker):
        value = value.realize()
    if type(value) is variables.TensorVariable:
        node = value.as_proxy().node
        if node in given:
            return Given(given.index(node))
        fake_kind(node)
        if node not in made or value.source:
            raise Odd
        return Output(node, node.meta["example_value"], value._is_name_set)
    if type(value) is variables.TupleVariable and not value.source:
        return [returned(item, given, made) for item in value.items]
    if isinstance(value, variables.ConstantVariable):
        try:
            literal(value.as_python_constant())
        except TypeError:
            raise Odd from None
        return value
    raise Odd


def like(tx: Any, value: Tensor) -> Tensor:
    """Another fake tensor of the same kind."""
    with tx.fake_mode, torch.enable_grad():
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return made.requires_grad_().clone() if value.requires_grad else made


def real_id(node: fx.Node) -> int:
    """The id of the tensor that a placeholder stands for; 0 if there is none."""
    argument = node.meta.get("grapharg")
    return id(argument.example) if argument is not None and isinstance(argument.example, Tensor) else 0


def check(node: fx.Node) -> None:
    """Raises Odd for a node that is not copied: one with a graph inside, or of a module, or with sizes that depend on
    data."""
    target = node.target
    plain = node.op == "call_method" or (node.op == "call_function" and not hasattr(target, "piece"))
    if not plain or isinstance(target, torch._ops.HigherOrderOperator):
        raise Odd
    value = node.meta.get("example_value")
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, (Tensor, *SYMBOLIC)) and free_unbacked_symbols(item):
            raise Odd


def first_name(node: fx.Node) -> str:
    made = node.meta.get("source_fn_stack")
    return str(made[-1][0]) if made else node.name
