"""The user's functions from `torch.fx.GraphModule` to `torch.fx.GraphModule`, run on what was traced before it becomes
a `Graph`.

Each gets the graph as the one before has left it, with the model's own tensors as attributes (see `graph_view.py`), and
returns it changed, or another one. What is wrong with its result is an error with the function's name.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from fxpipe.batching.op_errors import without_symbols
from fxpipe.capture.call_arguments import Call
from fxpipe.capture.capture_errors import innermost
from fxpipe.capture.tracing.dynamo import Traced
from fxpipe.capture.tracing.effects.observed_writes import memory
from fxpipe.capture.tracing.effects.op_effects import steps
from fxpipe.capture.tracing.symbolic_sizes import type_of
from fxpipe.capture.twins.twin import Slot
from fxpipe.errors import FxpipeError, PlanError, of_user

from .graph_view import Mistake, Transform, View, own_values, placeholders, trace_of, values, view_of


def transformed(
    traced: Traced, flat: Sequence[Any], call: Call, slots: Sequence[Slot], transforms: Sequence[Transform]
) -> Traced:
    """The trace after all transforms. Raises PlanError, with the name of the function, if one of them fails, or returns
    a graph that does not run, or has other inputs, outputs or parameters."""
    if transforms:
        own_values(traced.module)
    for transform in transforms:
        traced = _after(traced, flat, call, slots, transform)
    return traced


def _after(traced: Traced, flat: Sequence[Any], call: Call, slots: Sequence[Slot], transform: Transform) -> Traced:
    view = view_of(traced, flat, call, slots)
    try:
        found = transform(view.module)
    except FxpipeError:
        raise
    except Exception as error:
        where = innermost(traceback.extract_tb(error.__traceback__))
        what = f"{type(error).__name__}: {error}, at {where}"
        raise PlanError(f"transforms: {of_user(transform)} raises {what}") from error
    try:
        if not isinstance(found, fx.GraphModule):
            raise Mistake(f"returns {type(found).__name__}; return the GraphModule")
        _lint(found)
        new = trace_of(view, found, _line(transform))
        _check(view, new)
    except Mistake as mistake:
        raise PlanError(f"transforms: {of_user(transform)} {mistake}") from mistake.__cause__
    return new


def _line(transform: Any) -> str:
    """The line of a transform as torch writes it to ops; "" if it has none."""
    code = getattr(transform, "__code__", None)
    return "" if code is None else f'  File "{code.co_filename}", line {code.co_firstlineno}, in {code.co_name}\n'


def _lint(found: fx.GraphModule) -> None:
    try:
        found.graph.lint()
    except Exception as error:
        raise Mistake(f"returns a graph that is not well-formed: {error}") from error


def _check(view: View, after: Traced) -> None:
    """Run both graphs on fake tensors. Raises Mistake if the new one fails, or if the outputs, or the model's tensors
    that are written, are others than before."""
    before = view.traced
    wanted, got = (list(values(_output(traced.module).args[0])) for traced in (before, after))
    if len(got) != len(wanted):
        raise Mistake(f"returns {_count(len(got))}, and the captured graph {_count(len(wanted))}")
    known, then = steps(before)
    try:
        env, now = steps(after)
    except Exception as error:
        raise Mistake(f"returns a graph that does not run: {without_symbols(error)}") from error
    for index, (old, new) in enumerate(zip(wanted, got, strict=True)):
        pair = known[old] if isinstance(old, fx.Node) else old, env[new] if isinstance(new, fx.Node) else new
        kinds = tuple(type_of(value, {}) for value in pair)
        if kinds[0] != kinds[1]:
            said = [without_symbols(kind) + _gradient(value) for kind, value in zip(kinds, pair, strict=True)]
            raise Mistake(f"makes output {index} {said[1]}, and it is {said[0]} in the captured graph")
    writes = [{address for step in found for address in step.written} for found in (then, now)]
    nodes = placeholders(after.module)
    for path, place in view.held.items():
        was, is_now = (not one.isdisjoint(memory(env[nodes[place]])) for one in writes)
        if was and not is_now:
            raise Mistake(
                f"leaves out what writes {path} in place; torch.fx's eliminate_dead_code does so where nothing reads "
                "the result"
            )


def _gradient(value: Any) -> str:
    return f" {'with' if value.requires_grad else 'without'} a gradient" if isinstance(value, Tensor) else ""


def _output(module: fx.GraphModule) -> fx.Node:
    found: fx.Node = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    return found


def _count(outputs: int) -> str:
    return f"{outputs} output{'' if outputs == 1 else 's'}"
