"""Tells whether the user's code runs a second time: checkpointed stages run forward again in backward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Recomputing(threading.local):
    """Whether each thread recomputes, `now`."""

    def __init__(self) -> None:
        self.now = False


_recomputing = _Recomputing()


@contextmanager
def recomputing() -> Iterator[None]:
    """In this context `is_recomputing()` is True on this thread."""
    before, _recomputing.now = _recomputing.now, True
    try:
        yield
    finally:
        _recomputing.now = before


def is_recomputing() -> bool:
    """True while a stage's forward runs a second time in this thread, because its activations were not kept for
    backward. Code that counts calls, logs, or measures in a forward may skip the second run.

        class Counts(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                if not fxpipe.is_recomputing():
                    seen.append(x.shape)

    Call it where the user's own code runs in a pipe: in forward of custom autograd functions, and in submodules that
    are kept whole, because they cannot be traced (`pipe.explain()` names them). All else is captured, and the answer
    would be captured as a constant. The answer is False in the plain model, and while torch.utils.checkpoint inside of
    the model recomputes.
    """
    return _recomputing.now
