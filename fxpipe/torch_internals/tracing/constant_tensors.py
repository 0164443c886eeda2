"""Numbers of tensors that are made of Python's numbers alone are numbers while a model is traced.

    axes = torch.arange(2, x.dim()).tolist()      # [2, 3, 4], as losses over images write it

Dynamo takes what `tolist()` and `item()` return for numbers that depend on data. Where the tensor is made of constants
only, by ops that draw nothing and write into nothing, the ops are computed during tracing, on the CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fxpipe.torch_internals.capability import Capability, if_there

from .patched import patched

CONSTANT_TENSORS = Capability(
    what="calls of methods of the tensors of a trace",
    names=("torch._dynamo.variables.TensorVariable.call_method", "torch._dynamo.variables.base.VariableTracker.build"),
    since="2.5",
    without="models that ask for numbers of tensors made of constants are kept whole or refused",
)
MAKERS = frozenset({"arange", "tensor", "as_tensor", "zeros", "ones", "full", "eye"})
METHODS = frozenset({"tolist", "item"})
MOST = 32  # ops that are computed for one number: more are no constants of a model's shape


@if_there(CONSTANT_TENSORS)
@contextmanager
def folding_constants(arithmetic: Collection[str]) -> Iterator[None]:
    """A context in which Dynamo computes `tolist()` and `item()` of tensors that are made of constants by functions
    with these names."""
    from torch._dynamo import variables

    kind, build = variables.TensorVariable, variables.base.VariableTracker.build
    tracing = kind.call_method

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in METHODS and not args and not kwargs:
            node = self.as_proxy().node
            if isinstance(node, fx.Node) and (made := _computed(node, arithmetic)) is not None:
                return build(tx, getattr(made, name)())
        return tracing(self, tx, name, args, kwargs)

    with patched(kind, call_method=call_method):
        yield


def _computed(node: fx.Node, arithmetic: Collection[str]) -> torch.Tensor | None:
    """The tensor, if it is made of constants alone."""
    needed, todo = {node}, [node]
    while todo:
        one = todo.pop()
        if len(needed) > MOST or not _is_constant(one, arithmetic):
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


def _is_constant(node: fx.Node, arithmetic: Collection[str]) -> bool:
    """Whether an op makes its result of its arguments alone, and nothing can write into the result."""
    computes = _is_maker(node) or _is_arithmetic(node, arithmetic)
    return computes and all(_is_arithmetic(user, arithmetic) for user in node.users)


def _is_maker(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in MAKERS and not node.all_input_nodes


def _is_arithmetic(node: fx.Node, arithmetic: Collection[str]) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in arithmetic and not name.startswith("i")  # iadd writes
