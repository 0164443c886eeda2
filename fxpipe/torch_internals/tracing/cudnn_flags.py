"""The switches of cuDNN in a trace: `with torch.backends.cudnn.flags(enabled=False):`, as around losses of CTC."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxpipe.torch_internals.capability import Capability, if_there

from .patched import patched

CUDNN_FLAGS = Capability(
    what="calls of functions of torch that are no ops, in a trace",
    names=(
        "torch._dynamo.variables.TorchInGraphFunctionVariable.call_function",
        "torch._dynamo.variables.base.VariableTracker.build",
    ),
    since="2.5",
    without="modules that set switches of cuDNN are kept whole or refused",
)


def enter_cudnn_flags(*flags: bool) -> None:
    """Marks in a trace where ops begin that run with these switches: enabled, benchmark, deterministic, allow_tf32."""


def exit_cudnn_flags() -> None:
    """Marks where they end."""


@contextmanager
def marked_flags(
    enabled: bool = False,
    benchmark: bool = False,
    benchmark_limit: int = 10,
    deterministic: bool = False,
    allow_tf32: bool = True,
    **others: Any,
) -> Iterator[None]:
    """What is traced in place of `torch.backends.cudnn.flags`."""
    enter_cudnn_flags(enabled, benchmark, deterministic, allow_tf32)
    try:
        yield
    finally:
        exit_cudnn_flags()


@if_there(CUDNN_FLAGS)
@contextmanager
def cudnn_flags() -> Iterator[None]:
    """A context in which a trace has marks where switches of cuDNN are set and reset."""
    from torch._dynamo import variables

    for function in (enter_cudnn_flags, exit_cudnn_flags):  # here, as it imports Dynamo
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    kind, build = variables.TorchInGraphFunctionVariable, variables.base.VariableTracker.build
    calling = kind.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch.backends.cudnn.flags:
            return build(tx, marked_flags).call_function(tx, args, kwargs)
        return calling(self, tx, args, kwargs)

    with patched(kind, call_function=call_function):
        yield
