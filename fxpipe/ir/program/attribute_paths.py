"""Paths of a model's tensors as attributes of a `torch.fx.GraphModule`, whose code spells them."""

from __future__ import annotations

import keyword
import re
from collections.abc import Container


def attribute_path(path: str, taken: Container[str] = ()) -> str:
    """The path, with names that Python and torch.fx can spell; with `_` behind it as long as it is taken.

    >>> attribute_path("layers.0.weight"), attribute_path("named.in.weight"), attribute_path("cache['a']")
    ('layers.0.weight', 'named.in_.weight', 'cache_a')
    """
    parts = [re.sub(r"\W+", "_", part).strip("_") if not part.isidentifier() else part for part in path.split(".")]
    free = ".".join(f"{part}_" if keyword.iskeyword(part) or not part else part for part in parts)
    while free in taken:
        free += "_"
    return free
