"""The answer of `torch.compiler.is_compiling()`, set for one thread only.

Some models ask, and then call their submodules differently, for example with a full mask in place of None. torch
answers with a flag of the whole process. While one thread captures, models in other threads must not see its answer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_answers: dict[int, bool] = {}  # by thread


class _PerThread:
    """Replaces torch's flag, with its own truth for each thread."""

    def __init__(self, others: object) -> None:
        self.others = others

    def __bool__(self) -> bool:
        return _answers.get(threading.get_ident(), bool(self.others))


@contextmanager
def said_to_compile(answer: bool) -> Iterator[None]:
    """A context in which `is_compiling()` is `answer` for this thread."""
    thread = threading.get_ident()
    before = _answers.get(thread)
    with _lock:
        _answers[thread] = answer
        if not isinstance(torch.compiler._is_compiling_flag, _PerThread):
            torch.compiler._is_compiling_flag = _PerThread(torch.compiler._is_compiling_flag)  # type: ignore[assignment]
    try:
        yield
    finally:
        with _lock:
            if before is not None:
                _answers[thread] = before
            else:
                del _answers[thread]
            flag = torch.compiler._is_compiling_flag
            if not _answers and isinstance(flag, _PerThread):
                torch.compiler._is_compiling_flag = flag.others
