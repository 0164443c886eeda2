"""A function through torch.compile, under settings that hold only while it compiles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import nn

from fxpipe.torch_internals.capability import Capability

from .compiled_code import forget_with

COMPILER = Capability(
    what="torch.compile, with a call of ours around each compilation",
    names=(
        "torch._dynamo.optimize",
        "torch._dynamo.config.patch",
        "torch._functorch.config.patch",
    ),
    since="2.4",
    without="compile_stages is refused",
    check=lambda: hasattr(torch._dynamo.optimize(lambda graph, _: graph.forward, nopython=True), "callback"),
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


def compiled(
    owner: object, function: FunctionType, backend: Any, around: Callable[[], AbstractContextManager[Any]]
) -> Callable[..., Any]:
    """The function through torch.compile with this backend, as long as `owner` lives. Each compilation, which is one
    of forward and backward, is in a context of `around`. Raises FxpipeError."""
    COMPILER.need("compile_stages")
    context: Any = torch._dynamo.optimize(backend, nopython=True)
    context.callback = _Around(context.callback, around)
    run: Callable[..., Any] = context(function)
    forget_with(owner, function)
    return run


class _Around:
    """Dynamo's callback for code that is not compiled yet, in a context."""

    def __init__(self, compile: Callable[..., Any], around: Callable[[], AbstractContextManager[Any]]) -> None:
        self._torchdynamo_orig_backend = compile  # the name by which Dynamo finds the inner one
        self.around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(self.around())
            stack.enter_context(torch._dynamo.config.patch(SETTINGS))
            # Compile backward now too: later, other threads may be drawing random numbers.
            # What AOTAutograd has cached would not be recorded.
            settings = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
            stack.enter_context(torch._functorch.config.patch(settings))
            return self._torchdynamo_orig_backend(*args, **kwargs)


def copy_context(_: Any = None) -> None:
    """Give this thread's backward a copy of the context that all compiled nodes of one call of `backward` enter."""
    if OWN_CONTEXTS.there and torch._C._is_key_in_tls("context"):
        torch._C._stash_obj_in_tls("context", torch._C._get_obj_in_tls("context").copy())


# Lets something compile what runs in this thread from now on, None: nothing; returns what did. It is torch's function
# itself, since one of ours would be compiled.
set_compiler: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame if OFF.there else lambda compiler: None


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
    eval_frame: Any = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, eval_frame._FrameAction.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = function._torchdynamo_disable_recursive = True
    function._torchdynamo_disable_msg = because
    return function
