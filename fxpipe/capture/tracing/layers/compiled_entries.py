"""Keeps several compiled entry functions of one model.

An entry can be stale: the guards of the model's trace do not cover layers that were traced separately, whose state
(train or eval) may have changed; or an input value that was read while tracing differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .separate_layers import Layers

MOST = 4  # so many are kept


class CompiledEntries:
    """The compiled entry functions of a model, the one that was right last first; `begin` makes a new one."""

    def __init__(self, begin: Callable[[], Callable[..., Any]], layers: Layers) -> None:
        self._begin, self._layers = begin, layers
        self._all = [begin()]

    @property
    def first(self) -> Callable[..., Any]:
        return self._all[0]

    def reset(self) -> None:
        """Forget all of them."""
        self._all = [self._begin()]

    def next_entry(self, tried: int, never_right: bool) -> None:
        """The first entry was stale, and `tried` entries in this call: move on to the next one; put a new one first
        when all were tried. If even new ones are stale, or the first was stale as soon as it was made (`never_right`),
        trace no layers separately."""
        self._all.append(self._all.pop(0))
        if tried >= len(self._all):
            self._all = [self._begin(), *self._all[: MOST - 1]]
        if never_right or tried > MOST + 1:
            self._layers.give_up()
