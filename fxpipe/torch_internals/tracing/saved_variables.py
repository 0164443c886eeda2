"""Lets Dynamo know the saved tensors of a custom autograd function by their old name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fxpipe.torch_internals.capability import Capability, found, if_there

from .patched import patched

CONTEXT = "torch._dynamo.variables.misc.AutogradFunctionContextVariable"
SAVED_VARIABLES = Capability(
    what="attributes of the contexts of autograd functions in a trace",
    names=(f"{CONTEXT}.tp_getattro_impl or {CONTEXT}.var_getattr",),  # from torch 2.14 on the first
    since="2.1",
    without="autograd functions that use the old name of saved tensors are kept whole or refused",
)


@if_there(SAVED_VARIABLES)
@contextmanager
def saved_variables() -> Iterator[None]:
    """In the backward of an autograd function, `ctx.saved_variables` is `ctx.saved_tensors` by its old name, which
    Dynamo (torch 2.13) does not know: it finds nothing saved there."""
    kind = found(CONTEXT)
    method = "tp_getattro_impl" if hasattr(kind, "tp_getattro_impl") else "var_getattr"
    reading = getattr(kind, method)

    def read(self: Any, tx: Any, name: str) -> Any:
        return reading(self, tx, "saved_tensors" if name == "saved_variables" else name)

    with patched(kind, **{method: read}):
        yield
