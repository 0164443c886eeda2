"""Lets Dynamo trace code that uses a `contextvars.ContextVar`, with which libraries pass options of the outermost
forward to inner hooks.

    token = collector.set([])      a value for the time of the call
    try:
        y = self.layers(x)         a hook in there: collector.get().append(y)
    finally:
        collector.reset(token)

A value that forward sets exists only in the trace; a value that was set before the call is guarded by Dynamo.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

from fxpipe.torch_internals.capability import Capability, if_there

from .patched import patched

CONTEXT_VARIABLES = Capability(
    what="calls of methods of context variables in a trace",
    names=(
        "torch._dynamo.source.AttrSource",
        "torch._dynamo.source.CallFunctionNoArgsSource",
        "torch._dynamo.variables.UserDefinedObjectVariable.call_method",
        "torch._dynamo.variables.base.VariableTracker.build",
    ),
    since="2.5",
    without="models that set context variables in forward are kept whole or refused",
)


@dataclass
class Contexts:
    """What the current trace has set: for each variable, the (token, value) pairs, the latest last. Dynamo may restart
    a trace, with another `output`."""

    output: Any = None
    values: dict[ContextVar[Any], list[tuple[Any, Any]]] = field(default_factory=dict)

    def of(self, output: Any, variable: ContextVar[Any]) -> list[tuple[Any, Any]]:
        if self.output is not output:
            self.output, self.values = output, {}
        return self.values.setdefault(variable, [])

    def set_in(self, output: Any) -> frozenset[ContextVar[Any]]:
        """The variables that have a value of this trace's."""
        return frozenset(key for key, values in self.values.items() if values) if self.output is output else frozenset()

    @property
    def left(self) -> list[str]:
        """The names of the variables that were set and not reset."""
        return [variable.name for variable, values in self.values.items() if values]


@if_there(CONTEXT_VARIABLES)
@contextmanager
def context_variables(contexts: Contexts) -> Iterator[None]:
    """A context in which Dynamo traces `get`, `set` and `reset` of context variables."""
    from torch._dynamo import source, variables

    objects: Any = variables.UserDefinedObjectVariable
    build = variables.base.VariableTracker.build
    kind: Any = getattr(variables.misc, "ContextVarVariable", objects)  # its own from torch 2.14 on
    calling = kind.call_method

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        variable = getattr(self, "cv_obj", None) or getattr(self, "value", None)
        if type(variable) is not ContextVar or kwargs:
            return calling(self, tx, name, args, kwargs)
        values = contexts.of(tx.output, variable)
        if name == "set" and len(args) == 1:
            token = copy_context().run(variable.set, None)  # in no context that anyone sees
            values.append((token, args[0]))
            return objects(token)
        if name == "reset" and values and getattr(args[0], "value", None) is values[-1][0]:
            values.pop()
            return build(tx, None)
        if name == "get" and values:
            return values[-1][1]
        if name == "get" and self.source and not args and kind is objects:
            try:
                value = variable.get()
            except LookupError:  # it has none: Dynamo's error says so
                return calling(self, tx, name, args, kwargs)
            got = source.CallFunctionNoArgsSource(source.AttrSource(self.source, "get"))
            return build(tx, value, got)
        return calling(self, tx, name, args, kwargs)

    with patched(kind, call_method=call_method):
        yield
