"""The answer of `torch.compiler.is_compiling()`, set for one thread only.

Some models ask, and then call their submodules differently, for example with a full mask in place of None. torch
answers with a flag of the whole process. While one thread captures, models in other threads must not see its answer.
So the function, which models may have imported by name, gets other code meanwhile. The flag itself stays as it is:
libraries expect the answer to be a bool.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_answers: dict[int, bool] = {}  # by thread
_torchs = torch.compiler.is_compiling.__code__


def _is_compiling() -> bool:  # runs with the globals of torch.compiler
    import threading

    import torch

    from fxpipe.capture.opaque.is_compiling import _answers

    found = _answers.get(threading.get_ident())
    return torch.compiler._is_compiling_flag if found is None else found


@contextmanager
def said_to_compile(answer: bool) -> Iterator[None]:
    """A context in which `is_compiling()` is `answer` for this thread."""
    thread = threading.get_ident()
    before = _answers.get(thread)
    with _lock:
        _answers[thread] = answer
        torch.compiler.is_compiling.__code__ = _is_compiling.__code__
    try:
        yield
    finally:
        with _lock:
            if before is not None:
                _answers[thread] = before
            else:
                del _answers[thread]
            if not _answers:
                torch.compiler.is_compiling.__code__ = _torchs
