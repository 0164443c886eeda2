"""Whether code of the user's runs for the second time: stages that are checkpointed run forward again in backward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Now(threading.local):
    """Of each thread."""

    recomputing = False


_now = _Now()


@contextmanager
def recomputing() -> Iterator[None]:
    """In this context a stage runs again what it has run before."""
    before, _now.recomputing = _now.recomputing, True
    try:
        yield
    finally:
        _now.recomputing = before


def is_recomputing() -> bool:
    """Whether this thread runs a stage's forward again, for its backward: what counts calls, logs, or measures in a
    forward may want to leave the second time out.

        class Counts(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                if not fxpipe.is_recomputing():
                    seen.append(x.shape)

    It is asked where the user's own code runs in a pipe: in submodules that are kept whole, and in forward of custom
    autograd functions. The rest of a forward is captured, and so would be the answer. False everywhere else, also in
    the plain model, and while a checkpoint inside of the model is recomputed.
    """
    return _now.recomputing
