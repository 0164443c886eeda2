"""Recorded ops as one writes them: `torch.ops.aten.mul.Tensor(x, y)` as `x * y`, and what changes nothing left out."""

from __future__ import annotations

import operator
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from inspect import isbuiltin
from typing import Any

import torch

from fxpipe.batching.data_sizes import product
from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.graph.graph import Op, Ref, rename
from fxpipe.ir.graph.shared_memory_values import memory
from fxpipe.ir.graph.value_types import Dim, TensorType, ValueType
from fxpipe.torch_internals.operator_classes import OpOverload, overload_name, schema

aten = torch.ops.aten
_OPERATORS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: operator.add, aten.sub.Tensor: operator.sub, aten.mul.Tensor: operator.mul,
    aten.div.Tensor: operator.truediv, aten.add.Scalar: operator.add, aten.sub.Scalar: operator.sub,
    aten.mul.Scalar: operator.mul, aten.div.Scalar: operator.truediv, aten.neg.default: operator.neg,
    aten.pow.Tensor_Scalar: operator.pow,
}  # fmt: skip
# Methods of a tensor with the same arguments.
_METHODS = {
    aten.t.default: "t",
    aten.permute.default: "permute", aten.transpose.int: "transpose", aten.expand.default: "expand",
    aten.view.default: "view", aten._unsafe_view.default: "reshape", aten.reshape.default: "reshape",
    aten.unsqueeze.default: "unsqueeze", aten.squeeze.dim: "squeeze", aten.sum.dim_IntList: "sum",
    aten.sum.default: "sum", aten.mean.dim: "mean", aten.mean.default: "mean", aten.select.int: "select",
    aten.clone.default: "clone", aten.new_zeros.default: "new_zeros", aten.div_.Scalar: "div_",
    aten.div_.Tensor: "div_", aten.mul_.Scalar: "mul_", aten.mul_.Tensor: "mul_", aten.add_.Scalar: "add_",
    aten.bernoulli_.float: "bernoulli_", aten.zero_.default: "zero_", aten.copy_.default: "copy_",
    aten.masked_fill.Scalar: "masked_fill", aten.diagonal.default: "diagonal", aten.fill_.Scalar: "fill_",
}  # fmt: skip
_RESHAPES = ("view", "reshape")


def readable(op: Op) -> Op:
    """The op by a name from torch's documentation, if it has one; it calls the same function of the dispatcher."""
    func = op.target
    if not isinstance(func, OpOverload):
        return op
    plain = _without_defaults(func, op.kwargs)
    if func in _OPERATORS and not plain and len(op.args) <= 2 and isinstance(op.args[0], Ref):
        return replace(op, target=_OPERATORS[func], kwargs={})
    if func in _METHODS:
        method = _METHODS[func]
        made = replace(op, target=method, kwargs=plain)
        return _spread(made) if method in (*_RESHAPES, "permute", "expand") else made
    if func is aten._to_copy.default and set(plain) == {"dtype"}:
        return replace(op, target="to", args=(op.args[0], plain["dtype"]), kwargs={})
    if func is aten.slice.Tensor and len(op.args) in (4, 5) and op.args[1] >= 0 and not plain:
        start, stop, *step = op.args[2:]
        cut = slice(start or None, None if stop == sys.maxsize else stop, *(step if step != [1] else ()))
        return replace(op, target=operator.getitem, args=(op.args[0], (*[slice(None)] * op.args[1], cut)), kwargs={})
    name = schema(func).name.partition("::")[2]
    skips = any(isinstance(argument, list) and None in argument for argument in op.args)  # torch.index_put refuses it
    # Functions of torch that are written in Python may take and give something else.
    if func.namespace == "aten" and name[0] != "_" and isbuiltin(getattr(torch, name, None)) and not skips:
        # By default the op takes a mean, and the function of this name does not.
        omitted = [argument for argument in schema(func).arguments[len(op.args) :] if argument.name == "reduction"]
        said = {argument.name: argument.default_value for argument in omitted}
        return replace(op, target=getattr(torch, name), kwargs={**said, **plain})
    if overload_name(func) == "default":
        return replace(op, target=func.overloadpacket, kwargs=plain)
    return replace(op, kwargs=plain)


def _without_defaults(func: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments but those that say what is so anyway."""
    idle = {"pin_memory": (False, None), "layout": (torch.strided, None)}
    defaults = {argument.name: argument.default_value for argument in schema(func).arguments}
    return {
        key: value
        for key, value in kwargs.items()
        if value is not None or defaults.get(key) is not None
        if value not in idle.get(key, ())
    }


def _spread(op: Op) -> Op:
    """`x.view([2, 3])` as `x.view(2, 3)`; `x.view([])` stays, as torch has no `x.view()`."""
    first, dims, *rest = op.args
    return op if not dims else replace(op, args=(first, *dims, *rest))


def with_reshapes(ops: Sequence[Op], types: Mapping[str, ValueType]) -> list[Op]:
    """The ops with `reshape` in place of `view`, where nobody writes the memory: the strides that were traced may not
    be those of a run."""
    root = memory(ops, types)
    written = {root(name) for op in ops for name in op.writes}
    return [replace(op, target="reshape") if op.target == "view" and root(op.name) not in written else op for op in ops]


def with_unknown_size(op: Op, kind: ValueType) -> Op:
    """A reshape with -1 for its one size that varies: `x.view(-1, 8)`."""
    if op.target not in _RESHAPES or not isinstance(kind, TensorType) or 0 in kind.shape or -1 in op.args:
        return op
    varying = [place for place, dim in enumerate(kind.shape) if isinstance(dim, str)]
    if len(varying) != 1:
        return op
    dims = [-1 if place == varying[0] else dim for place, dim in enumerate(op.args[1:])]
    return replace(op, args=(op.args[0], *dims))


def with_same_sizes(op: Op, types: Mapping[str, ValueType]) -> Op:
    """An expand with -1 for the sizes that stay."""
    if op.target != "expand" or op.args[1:] == ([],):
        return op
    source, kind = types[op.args[0].name], op.type
    if not isinstance(source, TensorType) or not isinstance(kind, TensorType):
        return op
    ahead = len(kind.shape) - len(source.shape)
    same = [place >= ahead and kind.shape[place] == source.shape[place - ahead] for place in range(len(kind.shape))]
    return replace(op, args=(op.args[0], *(-1 if stays else dim for stays, dim in zip(same, op.args[1:], strict=True))))


def simplified(
    ops: Sequence[Op], types: Mapping[str, ValueType], keep: Collection[str] = ()
) -> tuple[list[Op], dict[str, str]]:
    """The ops without those that undo each other (`x.t().t()`) or do nothing (an `expand` or a reshape to the same
    shape, a power of 1), where no memory is written; and what the names of these are now. The values in `keep` stay."""
    if any(op.writes for op in ops):
        return list(ops), {}
    made: dict[str, Op] = {}
    same: dict[str, str] = {}
    found = []
    for op in ops:
        op = rename(op, same)
        source = op.args[0].name if op.args and isinstance(op.args[0], Ref) else ""
        before = made.get(source)
        if op.name in keep:
            made[op.name] = op
            found.append(op)
        elif (op.target in ("expand", *_RESHAPES) or _is_first_power(op)) and _alike(types.get(source), op.type):
            same[op.name] = source
        elif before is not None and _undoes(op, before):
            same[op.name] = before.args[0].name
        else:
            if op.target in _RESHAPES and before is not None and before.target in _RESHAPES:
                op = replace(op, target="reshape", args=(before.args[0], *op.args[1:]))
                if _alike(types.get(before.args[0].name), op.type):
                    same[op.name] = before.args[0].name
                    continue
            made[op.name] = op
            found.append(op)
    return found, same


def without_expands(
    ops: Sequence[Op], types: dict[str, ValueType], wanted: Collection[str]
) -> tuple[list[Op], dict[str, Dim]]:
    """The ops with `x / 64 * y` in place of `x.expand(8, 64) / 64 * y`, where y has the shape to which x is expanded,
    nothing else needs the expanded one, and no memory is written: the elements are the same. Also the bytes of those
    that have fewer elements now."""
    if any(op.writes for op in ops):
        return list(ops), {}
    readers = defaultdict[str, list[Op]](list)
    expanded = set[str]()  # and what is made of these and of numbers
    for op in ops:
        tensors = [name for name in op.reads if isinstance(types.get(name), TensorType)]
        for name in tensors:
            readers[name].append(op)
        if op.target == "expand" or (_is_pointwise(op) and len(tensors) == 1 and tensors[0] in expanded):
            expanded.add(op.name)

    @cache
    def is_repeated(name: str) -> bool:
        """Whether whatever reads it repeats its elements anyway."""
        return name not in wanted and all(
            is_repeated(op.name)
            if op.name in expanded and op.target != "expand"
            else _is_pointwise(op) and any(_alike(types.get(x), op.type) for x in op.reads if x not in expanded)
            for op in readers[name]
        )

    now: dict[str, str] = {}
    counts: dict[str, Dim] = {}
    found = []
    for op in ops:
        if op.target == "expand" and is_repeated(op.name):
            now[op.name] = op.args[0].name
            continue
        sources = [types[now.get(name, name)] for name in op.reads if name in now or name in counts]
        op = rename(op, now)
        if op.name in expanded and sources and isinstance(op.type, TensorType) and isinstance(sources[0], TensorType):
            types[op.name] = kind = replace(op.type, shape=sources[0].shape)
            op, counts[op.name] = replace(op, type=kind), f"{DTYPES[kind.dtype].size}*{product(kind.shape)}"
        found.append(op)
    return found, counts


def with_plain_sums(
    ops: Sequence[Op], types: dict[str, ValueType], wanted: Collection[str]
) -> tuple[list[Op], dict[str, str]]:
    """The ops with `x.sum(dim=0)` in place of `x.sum(dim=[0], keepdim=True).reshape(n)`, where nothing else reads the
    sum, it is not `wanted`, and no memory is written; and what the names of these are now."""
    if any(op.writes for op in ops):
        return list(ops), {}
    readers = Counter([*wanted, *(name for op in ops for name in op.reads)])
    made: dict[str, Op] = {}
    now: dict[str, str] = {}
    for op in ops:
        op = rename(op, now)
        before = made.get(op.args[0].name) if op.target in _RESHAPES and isinstance(op.args[0], Ref) else None
        if before is not None and readers[before.name] == 1 and _is_sum_of(before, op.type):
            dims = before.args[1]
            old, name = (before.name, op.name) if op.name in wanted else (op.name, before.name)
            del made[before.name]
            op = replace(before, name=name, args=(before.args[0], dims[0] if len(dims) == 1 else dims), type=op.type)
            now[old], types[name] = name, op.type
        made[op.name] = op
    return list(made.values()), now


def _is_sum_of(op: Op, kind: ValueType) -> bool:
    """Whether the op is a sum that has this type, but for dimensions that it keeps with size 1."""
    if op.target != "sum" or op.kwargs or op.args[2:] != (True,) or not op.args[1]:
        return False
    if not isinstance(op.type, TensorType) or not isinstance(kind, TensorType):
        return False
    shape = op.type.shape
    gone = {dim % len(shape) for dim in op.args[1]}
    return kind.shape == tuple(size for dim, size in enumerate(shape) if dim not in gone)


def _alike(one: ValueType | None, other: ValueType) -> bool:
    """Whether both are tensors of one element type and shape."""
    return (
        isinstance(one, TensorType)
        and isinstance(other, TensorType)
        and (one.dtype, one.shape) == (other.dtype, other.shape)
    )


def _is_pointwise(op: Op) -> bool:
    return op.target in (operator.add, operator.sub, operator.mul, operator.truediv, operator.neg) and not op.kwargs


def _is_first_power(op: Op) -> bool:
    return op.target is operator.pow and op.args[1:] in ((1,), (1.0,))


def _undoes(op: Op, before: Op) -> bool:
    if op.target == before.target == "t":
        return True
    if op.target == before.target == "transpose":
        return set(op.args[1:]) == set(before.args[1:])
    if op.target == before.target == "permute":
        return [before.args[1:][dim] for dim in op.args[1:]] == list(range(len(op.args) - 1))
    return False
