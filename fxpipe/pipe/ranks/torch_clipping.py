"""Refuses torch's own `clip_grad_norm_` over the parameters of one rank: its norm would be of this rank's stages alone.

torch offers no hook, and reads nothing but the gradients. But it lists the parameters that it is given, so an iterator
that it consumes, as in `clip_grad_norm_(pipe.parameters(), 1.0)`, can know that from the frames that call it. A list
that was made before, or `model.parameters()`, cannot.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch.nn.utils import clip_grad_norm_

from fxpipe.errors import FxpipeError

CLIPS = inspect.unwrap(clip_grad_norm_).__code__
NEAR = 6  # frames from here to a function that lists `pipe.parameters()`


def unless_clipped(pairs: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The keys and parameters of a rank. Raises FxpipeError, with the first, if torch's `clip_grad_norm_` asks."""
    frame = sys._getframe()
    for _ in range(NEAR):
        if frame.f_code is CLIPS:
            raise FxpipeError(
                "torch.nn.utils.clip_grad_norm_ sees the gradients of one rank alone, so ranks would clip by different "
                "norms; use fxpipe.clip_grad_norm_(pipe, max_norm)"
            )
        if frame.f_back is None:
            break
        frame = frame.f_back
    yield from pairs
