"""The answer of `torch.compiler.is_compiling()`: in a trace, and for one thread only.

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

from fxpipe.torch_internals.capability import Capability, if_there

ANSWER = Capability(
    what="the flag behind torch.compiler.is_compiling",
    names=("torch.compiler._is_compiling_flag",),
    since="2.6",
    without="a submodule that asks may be refused for another call than that of its trace",
    check=lambda: "_is_compiling_flag" in torch.compiler.is_compiling.__code__.co_names,
)
ANSWERS_IN_TRACES = Capability(
    what="the table of what functions like torch.compiler.is_compiling answer in a trace",
    names=("torch._dynamo.variables.torch.tracing_state_functions",),
    since="2.3",
    without="models that leave out too much when they are compiled are kept whole or refused",
)
_lock = threading.Lock()
_answers: dict[int, bool] = {}  # by thread
_torchs = torch.compiler.is_compiling.__code__


def _is_compiling() -> bool:  # runs with the globals of torch.compiler
    import threading

    import torch

    from fxpipe.torch_internals.tracing.is_compiling import _answers

    found = _answers.get(threading.get_ident())
    return torch.compiler._is_compiling_flag if found is None else found


@if_there(ANSWER)
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


@if_there(ANSWERS_IN_TRACES)
@contextmanager
def not_compiling() -> Iterator[None]:
    """A context in which `torch.compiler.is_compiling()` is false in a trace, by any of its names."""
    from torch._dynamo.variables.torch import tracing_state_functions

    answers = tracing_state_functions()
    known = {ask: said for ask, said in answers.items() if ask.__name__ in ("is_compiling", "is_dynamo_compiling")}
    answers.update(dict.fromkeys(known, False))
    try:
        yield
    finally:
        answers.update(known)
