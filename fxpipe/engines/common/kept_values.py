"""What forward of one stage and micro-batch keeps for backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

NO_BUFFERS: Mapping[str, Tensor] = MappingProxyType({})


class Kept:
    """What forward of one stage and micro-batch keeps for backward.

    - `args`: its arguments.
    - `results`: its results, with their graph if autograd computes gradients; None until they are recomputed.
    - `buffers`: the contents of its buffers before forward.
    - `values`: what the stage's own backward needs; None if autograd computes gradients.
    """

    __slots__ = ("args", "buffers", "results", "values")

    def __init__(
        self,
        args: tuple[Any, ...],
        results: tuple[Any, ...] | None = None,
        buffers: Mapping[str, Tensor] = NO_BUFFERS,
        values: list[Any] | None = None,
    ) -> None:
        self.args, self.results, self.buffers, self.values = args, results, buffers, values

    def roots(
        self, grads: Sequence[Tensor | None], places: Iterable[int]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The results that need a gradient and got one, and these gradients."""
        results = self.results
        assert results is not None
        pairs = [
            (results[place], grad)
            for place, grad in zip(places, grads, strict=True)
            if grad is not None and results[place].requires_grad
        ]
        return tuple([y for y, _ in pairs]), tuple([grad for _, grad in pairs])
