"""The arguments of an op, wherever they stand: by position, by name, or left out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from .graph import Op


def argument(op: Op, index: int, name: str, default: Any = None) -> Any:
    """One argument, or the default where it is left out.

    >>> from fxpipe.ir.graph.graph import Op, Origin, Ref
    >>> from fxpipe.ir.graph.value_types import TensorType
    >>> here, row = Origin("net.py", 1, "", ""), TensorType("f32", (2,), "cpu")
    >>> pad = Op("y", "narrow", (Ref("x"), 1), {"start": 2}, row, here)
    >>> argument(pad, 1, "dim"), argument(pad, 2, "start"), argument(pad, 3, "length", 4)
    (1, 2, 4)
    """
    return op.args[index] if len(op.args) > index else op.kwargs.get(name, default)


def by_name(op: Op, names: Sequence[str]) -> dict[str, Any]:
    """The arguments that are given, by name; `names` are those of the arguments by position, in order."""
    return dict(zip(names, op.args, strict=False)) | dict(op.kwargs)


def arguments(op: Op) -> dict[str, Any]:
    """All arguments of the op by name, defaults included. Its target must have a signature that `inspect` can read."""
    assert callable(op.target)
    bound = inspect.signature(op.target).bind(*op.args, **op.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
