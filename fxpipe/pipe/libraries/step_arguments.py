"""What a step passes to the model of a library besides what the user passes.

Models of transformers that generate return a cache of keys and values unless `use_cache=False` is passed. A step that
returns no outputs needs none, and without it the layers are given no object that each of them changes, so that a layer
is traced once for all.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from torch import nn

from .library_classes import ADAPTED, PRETRAINED, is_of

CACHE = "use_cache"

log = logging.getLogger("fxpipe")


def without_cache(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a step that returns no outputs: `use_cache=False` too, unless the user has passed it."""
    if CACHE in kwargs or not is_of(model, PRETRAINED, ADAPTED):
        return dict(kwargs)
    asked: Any = getattr(model, "get_base_model", lambda: model)  # that of PEFT, whose forward hands on
    forward = asked().forward
    function = getattr(forward, "__func__", forward)
    names = _arguments(function)[function is not forward :]
    if CACHE not in names or names.index(CACHE) < len(args):
        return dict(kwargs)
    log.debug("a step returns no cache: it passes use_cache=False")
    return {**kwargs, CACHE: False}


@lru_cache(maxsize=64)
def _arguments(forward: Callable[..., Any]) -> list[str]:
    """The names of its arguments."""
    return list(inspect.signature(forward).parameters)
