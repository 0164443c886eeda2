"""Errors about ops: the user's line, the problem, what to write instead."""

from __future__ import annotations

import re

from fxpipe.errors import CaptureError
from fxpipe.ir.graph.graph import Op, Origin
from fxpipe.ir.graph.opaque_call import Opaque

DATA_SIZES = (
    "the shape of its result depends on the values of a tensor",
    "select by a mask, as in x[mask], or keep the shape, as in torch.where(mask, x, 0)",
)
UNKNOWN = "?"  # a size that is not known before it is computed
SYMBOL = r"\b([su]\d+)\b(?:: hint = -?\d+)?"  # torch's names of sizes


def without_symbols(text: object) -> str:
    """A type or a message of torch, with "?" in place of torch's names of sizes.

    >>> without_symbols("f32[u0, 4]")
    'f32[?, 4]'
    """
    return re.sub(SYMBOL, UNKNOWN, str(text))


def at(origin: Origin | None) -> str:
    """The line that an error is about, and a line break; nothing if it is not known."""
    return f"{origin.file}:{origin.line}\n    {origin.code}\n" if origin is not None and origin.line else ""


def refuse(op: Op | None, problem: str, advice: str = "") -> CaptureError:
    """The error about an op: the user's line, the problem, what to write instead."""
    place = at(op.origin if op is not None else None)
    if op is not None and isinstance(op.target, Opaque) and op.target.origin.line:
        place += f"{op.target} is kept whole {op.target.because}, and\n"
    return CaptureError(
        f"{place}{problem}; {advice or 'the batch is cut into micro-batches, which must not depend on each other'}"
    )
