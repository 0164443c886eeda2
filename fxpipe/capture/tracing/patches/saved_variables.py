"""Lets Dynamo know the saved tensors of a custom autograd function by their old name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.variables import misc

from .patched import GETATTR, patched


@contextmanager
def saved_variables() -> Iterator[None]:
    """In the backward of an autograd function, `ctx.saved_variables` is `ctx.saved_tensors` by its old name, which
    Dynamo (torch 2.13) does not know: it finds nothing saved there."""
    kind: Any = misc.AutogradFunctionContextVariable
    reading = getattr(kind, GETATTR)

    def read(self: Any, tx: Any, name: str) -> Any:
        return reading(self, tx, "saved_tensors" if name == "saved_variables" else name)

    with patched(kind, **{GETATTR: read}):
        yield
