"""A function through torch.compile, under settings that hold only while it compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

from fxpipe.torch_internals.capability import Capability

COMPILER = Capability(
    what="torch.compile, with a call of ours around each compilation",
    names=("torch._dynamo.optimize", "torch._dynamo.config.patch"),
    since="2.4",
    without="nothing is captured, and compile_stages is refused",
)
Around = Callable[[], AbstractContextManager[Any]]


def compiled(
    function: FunctionType, backend: Any, around: Around = nullcontext, dynamic: bool | None = None
) -> Callable[..., Any] | None:
    """The function through torch.compile with this backend; None where that is switched off. Each compilation is in a
    context of `around`. `dynamic`: whether sizes and numbers vary; None: those that did."""
    from torch._dynamo import optimize

    context: Any = optimize(backend, nopython=True, dynamic=dynamic)
    if not hasattr(context, "callback"):
        return None
    context.callback = _Around(context.callback, around)
    run: Callable[..., Any] = context(function)
    return run


class _Around:
    """Dynamo's callback for code that is not compiled yet, in a context."""

    def __init__(self, compile: Callable[..., Any], around: Around) -> None:
        self._torchdynamo_orig_backend = compile  # the name by which Dynamo finds the inner one
        self.around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.around():
            return self._torchdynamo_orig_backend(*args, **kwargs)


def settings(known: Mapping[str, object]) -> AbstractContextManager[Any]:
    """A context with these settings of torch.compile, as far as this torch has them."""
    from torch._dynamo import config

    found: AbstractContextManager[Any] = config.patch({key: known[key] for key in known if hasattr(config, key)})
    return found


def is_refusal(error: BaseException) -> bool:
    """Whether torch.compile says with this error that it cannot read a function."""
    from torch._dynamo import exc

    return isinstance(error, exc.TorchDynamoException)
