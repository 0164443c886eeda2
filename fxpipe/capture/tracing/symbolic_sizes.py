"""Symbolic sizes as text, and the types of traced values.

Dynamo gives every dimension that varies a symbol of its own, `s33`. Those of the batch are all called `b`: they are
equal in every call, which the arguments' check sees to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

from fxpipe.ir.graph.dtypes import short_name
from fxpipe.ir.graph.value_types import IN_VMAP, Dim, ObjectType, ScalarType, TensorType, TupleType, ValueType
from fxpipe.runtime.each_sample import Samples
from fxpipe.torch_internals.compiling.dynamic_sizes import depends_on_data
from fxpipe.torch_internals.compiling.vmap_levels import in_vmap

from .layers.layer_values import Known


def symbol(size: Any) -> sympy.Symbol | None:
    """The symbol that a size is, if it is one and nothing more."""
    if isinstance(size, torch.SymInt):
        expression = size.node.expr
        return expression if isinstance(expression, sympy.Symbol) else None
    return None


def first_symbols(size: torch.SymInt) -> set[sympy.Symbol]:
    """The symbols of a size before it turned out to be equal to another: guards speak of these."""
    return set(size.node._expr.free_symbols)


def text(value: Any, names: Mapping[sympy.Symbol, str]) -> Dim:
    """A size as the graph says it: an int, or an expression over size names."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    # Of sizes that data decides, which torch takes to be equal where an op needs it, each keeps its own symbol.
    expression = value.node._expr if depends_on_data(value) else value.node.expr
    if isinstance(expression, sympy.Symbol):
        return names.get(expression, str(expression.name))
    if expression.is_number:
        return int(expression)
    # Integer symbols, lest sympy rewrite what it took from integers.
    new = {s: sympy.Symbol(names.get(s, s.name), integer=True) for s in expression.free_symbols}
    return str(expression.xreplace(new))


def type_of(value: Any, names: Mapping[sympy.Symbol, str]) -> ValueType:
    """The type of a traced value. Inside a vmap, and in a loop over samples, a tensor is an object that lives there
    only."""
    if (isinstance(value, Tensor) and in_vmap(value)) or isinstance(value, Samples):
        return IN_VMAP
    if isinstance(value, (Tensor, Known)):
        shape = tuple(text(size, names) for size in value.shape)
        return TensorType(short_name(value.dtype), shape, str(value.device), value.requires_grad)
    for kinds, kind in (
        ((bool, torch.SymBool), "bool"),
        ((int, torch.SymInt), "int"),
        ((float, torch.SymFloat), "float"),
    ):
        if isinstance(value, kinds):
            return ScalarType(kind)
    if isinstance(value, (tuple, list)):
        return TupleType(tuple(type_of(item, names) for item in value))
    return ObjectType("None" if value is None else type(value).__name__)
