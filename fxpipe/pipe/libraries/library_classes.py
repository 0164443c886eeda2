"""Whether a model is of a class of a library, by the class's name: the library need not be installed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import nn

GENERATES = "transformers.generation.utils.GenerationMixin"
PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
ADAPTED = "peft.peft_model.PeftModel"


def is_of(model: nn.Module, *names: str) -> bool:
    """Whether the model is an instance of one of the classes with these full names."""
    kind: Any = type(model)
    return not _names(kind).isdisjoint(names)


@lru_cache(maxsize=64)
def _names(kind: type) -> frozenset[str]:
    """The full names of the class and of its bases."""
    return frozenset(f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
