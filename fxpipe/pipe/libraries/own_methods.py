"""The model's own methods, called through a pipe over ranks.

    pipe.validation_step(batch)    the model's method, on an object of a subclass of the model's class with the model's
      self(x)                      attributes: a call of the model in it is a call of the pipe, by all ranks
      self.encoder.weight          the tensors of this rank; what needs those of others is refused, by the method's name

So what a method computes is never that of weights of the start.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from torch import nn

from fxpipe.errors import FxpipeError, ReleasedError

from .library_model import METHODS, method_of
from .model_in_other_class import with_methods
from .refused_methods import refused_of


def own_attribute(pipe: Any, name: str, whole: bool) -> Any:
    """The attribute `name` of the pipe's model; if it is a method, one that runs as above. `whole`: this process has
    all tensors of the model, so methods run on the model itself. Raises ReleasedError for an attribute that needs
    values of other ranks, and so does the method."""
    model = pipe.model
    with_name = naming(f"{name} of {type(model).__name__}", name)
    found = with_name(getattr)(model, name)
    if not isinstance(found, MethodType) or not isinstance(found.__self__, nn.Module):
        return found
    if found.__self__ is not model:
        return with_name(found)

    @wraps(found)
    def run(*args: Any, **kwargs: Any) -> Any:
        on = model if whole else driven(pipe)
        result = with_name(getattr(on, name))(*args, **kwargs)
        return pipe if result is on or result is model else result

    return run


def naming(what: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the errors of fxpipe that a function raises say that it is `what`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except FxpipeError as error:
                if str(error).startswith(f"{name} "):
                    raise
                after = f", where {name} then runs" if isinstance(error, ReleasedError) else ""
                raise type(error)(f"{what}: {error}{after}") from error

        return run

    return decorate


def driven(pipe: Any) -> Any:
    """The model, with calls of the pipe in place of its forward."""
    forward: Any = type(pipe.model).forward

    @wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return pipe(*args, **kwargs)

    def of_pipe(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: method(*args, **kwargs)

    found = {name: method_of(pipe, name) for name in METHODS}
    made = {name: of_pipe(method) for name, method in found.items() if method is not None}
    return with_methods(pipe.model, **refused_of(type(pipe.model)), **made, __call__=call, forward=call)
