"""What libraries ask of the class of a model before they train and save it, and which of its methods a pipe has itself.

The Trainer of transformers reads from the class of a model which arguments are labels, and saves by `save_pretrained`
only what is an instance of its own base class. A pipe is no subclass of the model's class, as its methods would be
other ones; but such a library, which asks for `pipe.__class__`, is told one that has both as bases. The class of other
models' pipes is what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import MethodType
from typing import Any

from .generate import generate
from .library_classes import ADAPTED, GENERATES, PRETRAINED, is_of
from .save_pretrained import save_pretrained

SAVES = ("save_pretrained", "from_pretrained")  # what the models of such a library have
# The methods of models of libraries that a pipe has itself, each with the classes that they are of.
METHODS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "generate": (generate, (GENERATES, ADAPTED)),
    "save_pretrained": (save_pretrained, (PRETRAINED,)),
}


def method_of(pipe: Any, name: str) -> Callable[..., Any] | None:
    """The pipe's own method in place of one of the model; None if there is none."""
    if name not in METHODS:
        return None
    function, owners = METHODS[name]
    return MethodType(function, pipe) if is_of(pipe.model, *owners) else None


def class_for_libraries(pipe: type, model: type) -> type:
    """The class that a pipe of this model says that it has."""
    return _both(pipe, model) if all(hasattr(model, name) for name in SAVES) else pipe


@lru_cache(maxsize=64)
def _both(pipe: type, model: type) -> type:
    """A subclass of both, of which there are no instances, with the name and the forward of the model's class."""
    made: Any = type(model.__name__, (pipe, model), {"__doc__": model.__doc__, "__module__": model.__module__})
    made.forward = model.forward  # type: ignore[attr-defined]
    return made  # type: ignore[no-any-return]


def device_map(devices: Sequence[str]) -> dict[str, str]:
    """What `hf_device_map` is for a model that a library has placed itself: it moves and replicates no such model."""
    return {f"stage {number}": label for number, label in enumerate(devices)}
