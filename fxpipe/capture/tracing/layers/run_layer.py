"""Runs the graph of a layer on fake tensors of the model's trace: what it makes there, and what it asks of sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx

from fxpipe.capture.capture_errors import line_of
from fxpipe.capture.tracing.effects.observed_writes import Effects, as_fake, memory
from fxpipe.torch_internals.compiling.dynamic_sizes import holds
from fxpipe.torch_internals.tracing.tensors_without_memory import FakeTensorMode
from fxpipe.torch_internals.tracing.trace_context import say_where

from .layer_trace import LayerCall, NotSeparate
from .layer_values import LayerRun


def run_layer(call: LayerCall, fakes: Sequence[Tensor]) -> LayerRun:
    """The run of the layer's graph. `fakes`: the arguments in the model's trace. Raises NotSeparate."""
    trace = call.trace
    mode: FakeTensorMode = fakes[0].fake_mode  # type: ignore[attr-defined]
    places = {id(tensor): place for place, tensor in enumerate(call.given)}
    env: dict[fx.Node, Any] = {}
    nodes = trace.placeholders
    for node, tensor in zip(nodes, call.taken, strict=True):
        if isinstance(tensor, Tensor):
            known = id(tensor) in places
            env[node] = fakes[places[id(tensor)]] if known else mode.from_tensor(tensor, static_shapes=True)
    for node, (place, dim) in trace.sizes.items():
        env[node] = env[nodes[place]].shape[dim]
    _ask(trace, [env[node] for node in nodes], nodes, mode)
    written, random = dict[fx.Node, tuple[int, ...]](), set[fx.Node]()
    with torch.set_grad_enabled(torch.is_grad_enabled()), Effects() as effects:
        for node in trace.module.graph.nodes:
            if node.op in ("call_function", "call_method"):
                env[node], written[node], drew = effects.of(partial(_run, node, env))
                random |= {node} if drew else set()
    given = set(memory(fakes))
    if not given.isdisjoint(chain.from_iterable(written.values())):
        raise NotSeparate("it writes into what it is given")
    held = given | {key for node in nodes for key in memory(env[node])}
    for output in trace.outputs:
        [key] = memory(env[output])
        if key in held:
            raise NotSeparate("it returns a part of what it is given, or of what it returns besides")
        held.add(key)
    return LayerRun(env, written, frozenset(random))


def _run(node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    if (frame := line_of(node)) is not None:
        say_where(frame.file, frame.line)
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return as_fake(node.target(*args, **kwargs))


def _ask(trace: Any, values: Sequence[Any], nodes: Sequence[fx.Node], mode: FakeTensorMode) -> None:
    """Put what the layer's Python asks of sizes into the guards of the model's trace; its ops ask again."""
    asked = [guard for guard in trace.guards if "_dynamo" in _asking(guard)]
    if not asked:
        return
    env: Any = mode.shape_env
    of: dict[Any, Any] = {}
    for node, value in zip(nodes, values, strict=True):
        if isinstance(value, Tensor):
            for inner, size in zip(node.meta["example_value"].shape, value.shape, strict=True):
                if isinstance(inner, torch.SymInt):
                    of.setdefault(inner.node._expr, size)
                    of.setdefault(inner.node.expr, size)
    for guard in asked:
        if not of.keys() >= guard.expr.free_symbols:
            raise NotSeparate("it asks for a size that is none of its arguments'")
        sizes = {s: of[s].node.expr if isinstance(of[s], torch.SymInt) else of[s] for s in guard.expr.free_symbols}
        expression = guard.expr.xreplace(sizes)
        if expression.is_Boolean and not expression.free_symbols:
            if not expression:
                raise NotSeparate("a guard on a size in the layer does not hold in the model")
            continue
        count = len(env.guards)
        if not holds(env, expression):
            raise NotSeparate("a guard on a size in the layer does not hold in the model")
        if len(env.guards) > count:  # with the line of the layer that asks
            env.guards[-1] = env.guards[-1]._replace(sloc=guard.sloc)


def _asking(guard: Any) -> str:
    frame = guard.sloc.framework_loc
    return str(getattr(frame, "filename", frame))
