"""Numbers of tensors that are made of Python's numbers alone are numbers while a model is traced.

    axes = torch.arange(2, x.dim()).tolist()      # [2, 3, 4], as losses over images write it

Dynamo takes what `tolist()` and `item()` return for numbers that depend on data. Where the tensor is made of constants
only, by ops that draw nothing and write into nothing, the ops are computed during tracing, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import VariableTracker

from fxpipe.ir.graph.ops import ARITHMETIC

from .patched import patched

MAKERS = frozenset({"arange", "tensor", "as_tensor", "zeros", "ones", "full", "eye"})
METHODS = frozenset({"tolist", "item"})
MOST = 32  # ops that are computed for one number: more are no constants of a model's shape


@contextmanager
def folding_constants() -> Iterator[None]:
    """A context in which Dynamo computes `tolist()` and `item()` of tensors that are made of constants."""
    tracing = TensorVariable.call_method

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in METHODS and not args and not kwargs:
            node = self.as_proxy().node
            if isinstance(node, fx.Node) and (made := _computed(node)) is not None:
                return VariableTracker.build(tx, getattr(made, name)())
        return tracing(self, tx, name, args, kwargs)

    with patched(TensorVariable, call_method=call_method):
        yield


def _computed(node: fx.Node) -> torch.Tensor | None:
    """The tensor, if it is made of constants alone."""
    needed, todo = {node}, [node]
    while todo:
        one = todo.pop()
        if len(needed) > MOST or not _is_constant(one):
            return None
        new = [read for read in one.all_input_nodes if read not in needed]
        needed.update(new)
        todo += new
    values: dict[fx.Node, Any] = {}
    for one in (each for each in node.graph.nodes if each in needed):
        args, given = fx.map_arg((one.args, dict(one.kwargs)), values.__getitem__)
        kwargs = {key: "cpu" if key == "device" else value for key, value in given.items()}
        assert callable(one.target)
        try:
            values[one] = one.target(*args, **kwargs)
        except Exception:  # the model's own, which Dynamo reports with its line
            return None
    made = values[node]
    return made if type(made) is torch.Tensor else None


def _is_constant(node: fx.Node) -> bool:
    """Whether an op makes its result of its arguments alone, and nothing can write into the result."""
    return (_is_maker(node) or _is_arithmetic(node)) and all(map(_is_arithmetic, node.users))


def _is_maker(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in MAKERS and not node.all_input_nodes


def _is_arithmetic(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in ARITHMETIC and not name.startswith("i")  # iadd writes
