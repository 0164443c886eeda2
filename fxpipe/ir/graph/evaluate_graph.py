"""The meaning of a graph: its ops run one after the other on real tensors.

It is slow and keeps every value. It is for tests, which compare it with the model and with the pipeline, and for
readers who want to know what an op, a region or a size means.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch

from .graph import Graph, Op, Region, map_refs

CUDNN_FLAGS = ("enabled", "benchmark", "deterministic", "allow_tf32")  # the arguments of a region "cudnn"
Draw = Callable[[int], AbstractContextManager[Any]]
_orders: list[bool] = []  # whether torch.einsum chose its order before each context in which it may not
_lock = Lock()


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Any],
    states: Mapping[str, Any],
    draw: Draw = lambda number: nullcontext(),
) -> dict[str, Any]:
    """The value of every name of the graph, given those of its inputs and states (constants may be left out). Random
    ops run inside `draw(number)`. What an epilogue computes is that of these inputs alone.

    >>> from fxpipe.ir.graph.graph import Graph, Input, Op, Origin, Output, Ref, Size
    >>> from fxpipe.ir.graph.value_types import ScalarType, TensorType
    >>> row, here = TensorType("f32", ("b", 2), "cpu"), Origin("net.py", 1, "x * b", "")
    >>> double = Op("y", operator.mul, (Ref("x"), Ref("b")), {}, row, here)
    >>> x, b, y = Input("x", "x", row, 0), Size("b", "x", 0), Output("y", 0)
    >>> graph = Graph("Net", True, (x,), (b,), (), (double,), (y,), ((Ref("x"),), {}), Ref("y"))
    >>> evaluate(graph, {"x": torch.ones(3, 2)}, {})["y"].sum()
    tensor(18.)
    """
    values = {state.name: state.value for state in graph.states if state.kind == "constant"}
    values |= {**inputs, **states}
    values |= {size.name: values[size.input].shape[size.dim] for size in graph.sizes}
    for op in graph.ops:
        values[op.name] = within(op, values, draw)
    if graph.epilogue is not None:
        values |= evaluate(graph.epilogue, {item.name: values[item.name] for item in graph.epilogue.inputs}, {})
    return values


def with_totals(graph: Graph, inputs: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of the whole batch, together with the graph's totals."""
    if graph.totals is None:
        return dict(inputs)
    values = evaluate(graph.totals, inputs, states)
    return {**inputs, **{output.value: values[output.value] for output in graph.totals.outputs}}


def within(op: Op, values: Mapping[str, Any], draw: Draw) -> Any:
    """The op's result, computed in its regions; random ops inside `draw(op.draw)`."""
    with ExitStack() as contexts:
        for region in op.regions:
            contexts.enter_context(enter(region))
        if op.draw is not None:
            contexts.enter_context(draw(op.draw))
        return call(op, values)


def call(op: Op, values: Mapping[str, Any]) -> Any:
    """The op's result, given the values it reads. The result of `x[i] = v` is the changed `x`."""
    args, kwargs = map_refs((op.args, dict(op.kwargs)), lambda ref: values[ref.name])
    if isinstance(op.target, str):
        return getattr(args[0], op.target)(*args[1:], **kwargs)
    result = op.target(*args, **kwargs)
    return args[0] if op.target is operator.setitem else result


def enter(region: Region) -> AbstractContextManager[Any]:
    """The context that a region stands for."""
    if region.kind == "grad":
        return torch.set_grad_enabled(region.args[0])
    if region.kind == "cudnn":
        return cudnn_flags(*region.args)
    device, dtype, enabled, cache = region.args
    return torch.autocast(device, dtype, enabled, cache)


def cudnn_flags(*flags: bool) -> AbstractContextManager[Any]:
    """A context in which cuDNN has these switches, CUDNN_FLAGS."""
    found: AbstractContextManager[Any] = torch.backends.cudnn.flags(**dict(zip(CUDNN_FLAGS, flags, strict=True)))
    return found


@contextmanager
def left_to_right() -> Iterator[None]:
    """A context in which torch.einsum multiplies from left to right. With opt_einsum it chooses by sizes, and so makes
    numbers of symbols. For all threads, until the last of them has left its context."""
    settings: Any = torch.backends.opt_einsum
    with _lock:
        _orders.append(settings.enabled)
        settings.enabled = False
    try:
        yield
    finally:
        with _lock:
            before = _orders.pop()
            if not _orders:  # so this is what the first one met
                settings.enabled = before
