"""The type of a value of the model: tensor, number, tuple, or another Python object.

Shapes are symbolic where the model allows any size: a dimension is an int or an expression over size names, as in
`f32[b, 3, h, 2*b]`. Expressions stay text, because they are printed far more often than computed; `dim_size` computes
one, given numbers for its names. Nothing here imports torch, so that planners can read types too.

A size that values of tensors decide has a name of its own and a bound, over the names of others: `x[mask]` is
`f32[u0<=12*b, 8]`. Plans compute with the bound.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

from .dtypes import DTYPES

Dim = int | str
BATCH = "b"  # the size of the batch


@dataclass(frozen=True)
class TensorType:
    """A tensor's element type, shape (symbolic dimensions as text), device, and whether gradients flow through it.

    >>> print(TensorType("f32", ("b", 3, "2*b"), "cpu"))
    f32[b, 3, 2*b]
    >>> TensorType("f32", ("b", 3), "cpu").nbytes({"b": 4})
    48
    """

    dtype: str
    shape: tuple[Dim, ...]
    device: str
    grad: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def numel(self, sizes: Mapping[str, int]) -> int:
        """Elements, with `sizes` giving a number for every symbolic size name."""
        return math.prod([dim if type(dim) is int else dim_size(dim, sizes) for dim in self.shape])

    def nbytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of the elements, without padding or shared storage."""
        return self.numel(sizes) * DTYPES[self.dtype].size


@dataclass(frozen=True)
class ScalarType:
    """A Python number that depends on sizes or data: `kind` is int, float or bool."""

    kind: str

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True)
class TupleType:
    """Several values in one: what `chunk`, `max(dim=...)` or an LSTM returns."""

    items: tuple[ValueType, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.items))})"


@dataclass(frozen=True)
class ObjectType:
    """Any other Python object, None included. It never crosses from one stage to another."""

    name: str

    def __str__(self) -> str:
        return self.name


NO_VALUE = ObjectType("None")
VMAP, IN_VMAP = ObjectType("vmap"), ObjectType("tensor in a vmap")  # what enters a vmap, and a tensor inside

ValueType = TensorType | ScalarType | TupleType | ObjectType


def tensors(type: ValueType) -> Iterator[TensorType]:
    """The tensor types inside `type`, in order."""
    if isinstance(type, TensorType):
        return iter((type,))
    return chain.from_iterable(map(tensors, type.items)) if isinstance(type, TupleType) else iter(())


def in_vmap(kind: ValueType) -> bool:
    """Whether a value exists only inside a vmap; for a tuple, whether any item does."""
    return any(map(in_vmap, kind.items)) if isinstance(kind, TupleType) else kind == IN_VMAP


def nbytes(type: ValueType, sizes: Mapping[str, int]) -> int:
    """Bytes of all tensors inside `type`."""
    return type.nbytes(sizes) if isinstance(type, TensorType) else sum(t.nbytes(sizes) for t in tensors(type))


_OPERATORS: dict[type, Callable[..., int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg, ast.Div: operator.truediv,
}  # fmt: skip
_COMPARISONS: dict[type, Callable[..., bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
# The functions that sympy and torch write into a shape expression.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Max": max, "Min": min, "max": max, "min": min, "CeilDiv": lambda a, b: -(-a // b),
    "CleanDiv": operator.floordiv, "FloorDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod,
    "CeilToInt": math.ceil, "FloorToInt": math.floor, "TruncToInt": math.trunc, "RoundToInt": round,
    "ToFloat": lambda a: 1.0 * a, "FloatTrueDiv": operator.truediv, "IntTrueDiv": operator.truediv,
    "PowByNatural": operator.pow, "FloatPow": operator.pow,
}  # fmt: skip


@lru_cache(maxsize=4096)
def _parse(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


@lru_cache(maxsize=4096)
def dim_names(dim: Dim) -> tuple[str, ...]:
    """The size names a dimension depends on, sorted.

    >>> dim_names("2*b + s1")
    ('b', 's1')
    """
    if isinstance(dim, int):
        return ()
    names = {node.id for node in ast.walk(_parse(dim)) if isinstance(node, ast.Name)}
    bounded = (node.left for node in ast.walk(_parse(dim)) if isinstance(node, ast.Compare)) if "<=" in dim else ()
    return tuple(sorted(names - _FUNCTIONS.keys() - {left.id for left in bounded if isinstance(left, ast.Name)}))


@lru_cache(maxsize=4096)
def data_sizes(dim: Dim) -> Mapping[str, str]:
    """The sizes in a dimension that values of tensors decide, without those in their bounds: their names, and each with
    its bound.

    >>> data_sizes("2*(u0<=12*b)")
    {'u0': 'u0<=12*b'}
    """
    if isinstance(dim, int) or "<=" not in dim:
        return {}
    outermost: list[ast.AST] = [_parse(dim)]
    found = dict[str, str]()
    for node in outermost:
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name):
            found[node.left.id] = ast.get_source_segment(dim, node) or dim
        else:
            outermost.extend(ast.iter_child_nodes(node))
    return found


def sized_by_data(type: ValueType) -> bool:
    """Whether a size of a tensor in `type` is known only when the op that makes it has run."""
    return any(isinstance(dim, str) and "<=" in dim for tensor in tensors(type) for dim in tensor.shape)


def may_cross(type: ValueType) -> bool:
    """Whether a value of this type may move from one stage to another: tensors of known sizes and plain numbers may."""
    return isinstance(type, (TensorType, ScalarType)) and not sized_by_data(type)


def dim_size(dim: Dim, sizes: Mapping[str, int]) -> int:
    """The number a dimension stands for; of a size that data decides the bound, unless it is given.

    >>> dim_size("2*b + s1//2", {"b": 4, "s1": 6}), dim_size("u0<=12*b", {"b": 4})
    (11, 48)
    >>> dim_size("CeilToInt(FloatTrueDiv(ToFloat(-b) - ToFloat(b), -1.0))", {"b": 4})
    8
    """
    if isinstance(dim, int):
        return dim
    size: int = sizes[dim] if dim in sizes else _evaluate(_parse(dim), sizes)
    return size


def holds(condition: str, sizes: Mapping[str, int]) -> bool:
    """Whether a condition on sizes, written as Python, holds. One that is about other sizes too is not known to fail.

    >>> holds("b == 1 or seq <= 2*b", {"b": 4, "seq": 9}), holds("seq <= 64", {"b": 4})
    (False, True)
    """
    try:
        return not sizes.keys() >= set(dim_names(condition)) or _is_true(_parse(condition), sizes)
    except (ValueError, SyntaxError):
        return True


def _is_true(node: ast.expr, sizes: Mapping[str, int]) -> bool:
    match node:
        case ast.BoolOp(op=op, values=values):
            return (all if isinstance(op, ast.And) else any)(_is_true(value, sizes) for value in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _is_true(operand, sizes)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
            numbers = [_evaluate(one, sizes) for one in (left, *others)]
            return all(_COMPARISONS[type(op)](*pair) for op, pair in zip(ops, pairwise(numbers), strict=True))
    raise ValueError(f"cannot tell whether {ast.unparse(node)!r} holds")


def _evaluate(node: ast.expr, sizes: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=int(value) | float(value)):
            return value
        case ast.Name(id=name) if name in sizes:
            return sizes[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(left, sizes), _evaluate(right, sizes))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluate(operand, sizes))
        case ast.Compare(left=ast.Name(id=name), ops=[ast.LtE()], comparators=[bound]):
            return sizes[name] if name in sizes else _evaluate(bound, sizes)
        case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_evaluate(arg, sizes) for arg in args))
    raise ValueError(f"cannot compute the size {ast.unparse(node)!r} from {dict(sizes)}")
