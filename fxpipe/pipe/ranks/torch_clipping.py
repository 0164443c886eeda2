"""Refuses functions of torch.nn.utils that would take the parameters of one rank for those of the whole model: its norm
would be of this rank's stages alone, its vector would have only their values.

torch has no hook for this, so the functions are recognised among the callers on the stack, at two places: where they
consume the iterator in `clip_grad_norm_(pipe.parameters(), 1.0)`, and where they read a tensor of another rank, as in
`clip_grad_norm_(model.parameters(), 1.0)`. A list of this rank's parameters that the caller has made before is not
noticed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.nn import utils

from fxpipe.errors import FxpipeError

NEAR = 6  # frames from here to a function that lists `pipe.parameters()`
VECTOR = (
    "sees the parameters of one rank alone: pipe.state_dict() has them by name, pipe.gather() puts all into the model"
)
REFUSED = {
    "clip_grad_norm_": "sees the gradients of one rank alone, so ranks would clip by different norms; use "
    "fxpipe.clip_grad_norm_(pipe, max_norm)",
    "get_total_norm": "sees the gradients of one rank alone, and returns another norm on each; "
    "fxpipe.clip_grad_norm_(pipe, math.inf) returns that of all, and changes nothing",
    "parameters_to_vector": VECTOR,
    "vector_to_parameters": VECTOR,
}


def code_of(function: Callable[..., Any]) -> Any:
    """The code that runs: torch wraps some of these functions."""
    inner = inspect.unwrap(function)
    cells = (cell.cell_contents for cell in inner.__closure__ or ())
    return next((one for one in cells if inspect.isfunction(one)), inner).__code__


CODES = {code_of(getattr(utils, name)): f"torch.nn.utils.{name} {why}" for name, why in REFUSED.items()}


def refuse_partial() -> None:
    """Raise FxpipeError if one of these functions is calling."""
    frame = sys._getframe(1)
    for _ in range(NEAR):
        if frame.f_code in CODES:
            raise FxpipeError(CODES[frame.f_code])
        if frame.f_back is None:
            return
        frame = frame.f_back


def unless_partial(pairs: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The keys and parameters of a rank. Raises FxpipeError, with the first, if one of torch's functions asks that
    would take them for all."""
    refuse_partial()
    yield from pairs
