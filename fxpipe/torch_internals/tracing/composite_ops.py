"""Ops that torch composes of other ops in C++, which turns a symbolic batch size into a number, or asks for values.

A graph with such an op would be valid for one batch size only, or there would be none. While a model is traced, these
ops are composed in Python instead, where sizes may be symbols. Only shapes and types come from here: stages run torch's
own ops.

Recurrent layers are traced by their first step only. To find the shapes of an LSTM's results, torch runs all its steps
in Python, which takes minutes for a second of sound; but all steps have the same shapes. torch applies no dropout
between the layers in this run, so it does not show whether the layer is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fxpipe.torch_internals.capability import Capability, if_there

from .patched import patched

COMPOSITES = Capability(
    what="ops that are composed in Python, where sizes may be symbols",
    names=(
        "torch._C.DispatchKey.CompositeImplicitAutograd",
        "torch._ops.OpOverload.py_impl",
        "torch.ops.aten.kron.default.py_kernels",
        "torch.ops.aten.kron.default._dispatch_cache",
    ),
    since="2.0",
    without="models with take_along_dim, kron, multi_dot or ctc_loss are captured for each batch size, or refused",
)
RECURRENT_STEPS = Capability(
    what="the steps of recurrent layers in Python",
    names=("torch._decomp.decompositions.one_layer_rnn", "torch._decomp.decompositions.one_layer_lstm"),
    since="2.0",
    without="recurrent layers over long sequences take long to capture",
)
Sizes = Sequence[int | torch.SymInt]


def take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return x.reshape(-1).gather(0, indices.reshape(-1))
    at = dim % x.dim()
    sizes = [other if size == 1 else size for size, other in zip(x.shape, indices.shape, strict=True)]
    return x.expand(_put(sizes, at, x.shape[at])).gather(at, indices.expand(_put(sizes, at, indices.shape[at])))


def kron(x: Tensor, y: Tensor) -> Tensor:
    dims = max(x.dim(), y.dim())
    left, right = ([1] * (dims - len(shape)) + list(shape) for shape in (x.shape, y.shape))
    spread = x.reshape([size for pair in zip(left, [1] * dims, strict=True) for size in pair])
    product = spread * y.reshape([size for pair in zip([1] * dims, right, strict=True) for size in pair])
    return product.reshape([one * other for one, other in zip(left, right, strict=True)])


def multi_dot(tensors: Sequence[Tensor]) -> Tensor:
    return reduce(torch.matmul, tensors)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    of_each = log_probs.sum((0, 2)) if log_probs.dim() == 3 else log_probs.sum()
    return of_each.sum() if reduction else of_each


def _put(sizes: Sizes, at: int, size: Any) -> list[Any]:
    return [*sizes[:at], size, *sizes[at + 1 :]]


OPS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.take_along_dim.default: take_along_dim,
    torch.ops.aten.kron.default: kron,
    torch.ops.aten.linalg_multi_dot.default: multi_dot,
    torch.ops.aten.ctc_loss.Tensor: ctc_loss,
}


@if_there(COMPOSITES)
@contextmanager
def composed_in_python() -> Iterator[None]:
    """A context in which fake tensors use the functions above for ops that torch does not have in Python."""
    from torch._C import DispatchKey

    composed: Any = DispatchKey.CompositeImplicitAutograd
    added = [op for op in OPS if composed not in op.py_kernels]
    for op in added:
        op.py_impl(composed)(OPS[op])
    try:
        yield
    finally:
        for op in added:
            op.py_kernels.pop(composed, None)
            op._dispatch_cache.clear()


# Recurrent layers -----------------------------------------------------------------------------------------------------


@if_there(RECURRENT_STEPS)
@contextmanager
def one_step() -> Iterator[None]:
    """A context in which recurrent layers on fake tensors compute only their first step, and use it for all steps."""
    from torch._decomp import decompositions as steps

    rnn, lstm = _first_step(steps.one_layer_rnn), _first_step(steps.one_layer_lstm)
    with patched(steps, one_layer_rnn=rnn, one_layer_lstm=lstm):
        yield


def _first_step(layer: Callable[..., Any]) -> Callable[..., Any]:
    def run(sequence: Any, *args: Any, **kwargs: Any) -> Any:
        out, last = layer(sequence[:1], *args, **kwargs)
        return out.expand(sequence.shape[0], *out.shape[1:]).contiguous(), last

    return run
