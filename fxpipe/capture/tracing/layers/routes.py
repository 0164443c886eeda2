"""The traces of a model of which some take for granted what a layer is not at present, such as in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .leaves import Layers

MOST = 4  # so many are kept


class Routes:
    """The routes of a model with its layers, the one that was right last first; `begin` makes a new one."""

    def __init__(self, begin: Callable[[], Callable[..., Any]], layers: Layers) -> None:
        self._begin, self._layers = begin, layers
        self._all = [begin()]

    @property
    def first(self) -> Callable[..., Any]:
        return self._all[0]

    def anew(self) -> None:
        """Forget all of them."""
        self._all = [self._begin()]

    def turn(self, tried: int) -> None:
        """The first one is stale, as are `tried` of them in this call: go another one, or a new one; without leaves
        where they are stale right after the trace."""
        self._all.append(self._all.pop(0))
        if tried >= len(self._all):
            self._all = [self._begin(), *self._all[: MOST - 1]]
        if tried > MOST + 1:
            self._layers.give_up()
