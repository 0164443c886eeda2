"""Stages through torch.compile, and code that it leaves alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from fxpipe.errors import FxpipeError
from fxpipe.torch_internals.capability import Capability

from .compiled_code import SWITCHED_OFF, forget_with, frames
from .compiler import COMPILER, Around, compiled, settings

WHOLE_BACKWARDS = Capability(
    what="torch.compile of forward and backward at once",
    names=("torch._functorch.config.patch",),
    since="2.4",
    without="compile_stages is refused",
)
OWN_CONTEXTS = Capability(
    what="the context variables that compiled backwards of one call share",
    names=("torch._C._is_key_in_tls", "torch._C._stash_obj_in_tls", "torch._C._get_obj_in_tls"),
    since="2.0",
    without="compiled backwards of several accelerators in one process are not given contexts of their own",
)
OFF = Capability(
    what="code that torch.compile does not look at, without a call in between",
    names=(
        "torch._C._dynamo.eval_frame.set_eval_frame",
        "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        "torch._C._dynamo.eval_frame._FrameAction.SKIP",
        "torch._C._dynamo.eval_frame._FrameExecStrategy",
    ),
    since="2.7",
    without="torch.compiler.disable does it",
)
CALLS = Capability(
    what="the method of modules through which torch.compile reads calls of them",
    names=("torch.nn.Module._call_impl",),
    since="1.5",
    without="torch.compile of a model with a pipe in it reads the hooks of the pipe too, and stops at its forward",
)
# The limits allow many kinds of calls of one piece: with and without gradients or autocast, sizes 1 and others.
M = TypeVar("M", bound=nn.Module)
SETTINGS: dict[str, object] = {"allow_rnn": True, "recompile_limit": 64, "accumulated_recompile_limit": 1024}


def compiled_stage(owner: object, function: FunctionType, backend: Any, around: Around) -> Callable[..., Any]:
    """The function through torch.compile with this backend, as long as `owner` lives. Each compilation, which is one
    of forward and backward, is in a context of `around`. Raises FxpipeError."""
    for capability in (COMPILER, WHOLE_BACKWARDS):
        capability.need("compile_stages")

    from torch._functorch import config

    @contextmanager
    def compiling() -> Iterator[None]:
        # Compile backward now too: later, other threads may be drawing random numbers.
        # What AOTAutograd has cached would not be recorded.
        known = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
        with around(), settings(SETTINGS), config.patch(known):
            yield

    run = compiled(function, backend, compiling)
    if run is None:
        raise FxpipeError(f"compile_stages compiles nothing: {SWITCHED_OFF}")
    forget_with(owner, function)
    return run


def copy_context(_: Any = None) -> None:
    """Give this thread's backward a copy of the context that all compiled nodes of one call of `backward` enter."""
    if OWN_CONTEXTS.there and torch._C._is_key_in_tls("context"):
        torch._C._stash_obj_in_tls("context", torch._C._get_obj_in_tls("context").copy())


# Lets something compile what runs in this thread from now on, None: nothing; returns what did. It is torch's function
# itself, since one of ours would be compiled.
set_compiler: Callable[[Any], Any] = frames().set_eval_frame if OFF.there else lambda compiler: None


def calls_through(mark: Callable[[Any], Any]) -> Callable[[type[M]], type[M]]:
    """A decorator of a class of modules: calls of them go through `mark` of the method that torch has for them."""

    def decorate(kind: type[M]) -> type[M]:
        if CALLS.there:
            kind._call_impl = mark(nn.Module._call_impl)  # type: ignore[method-assign]
        return kind

    return decorate


def left_alone(function: Any, because: str) -> Any:
    """The function, marked as one that torch.compile runs as it is."""
    if not OFF.there:
        return torch.compiler.disable(function, reason=because)  # type: ignore[no-untyped-call]
    eval_frame = frames()
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = function._torchdynamo_disable_recursive = True
    function._torchdynamo_disable_msg = because
    return function
