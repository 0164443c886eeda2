"""What a step needs from its scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

# The methods of a step that compute, with the kinds of their actions.
ACTIONS = {
    "forward": "F",
    "forward_to_recompute": "F",
    "recompute": "R",
    "backward": "B",
    "input_gradient": "I",
    "weight_gradient": "W",
}


class Gradients(NamedTuple):
    """The arguments (`takes`) and results (`gives`) of a stage that have a gradient: their names and places."""

    takes: Mapping[str, int]
    gives: Mapping[str, int]


class StepEngine(Protocol):
    """What a step needs from its scheduler (see `StepScheduler`).

    `apart`: whether stages, or their replicas, are on several devices of torch; `at_once`: stages and micro-batches
    whose backward immediately follows their forward; `splits`: whether any backward is in two halves.
    """

    devices: tuple[str, ...]
    feeds: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int | None, str | None], ...]
    gradients: tuple[Gradients, ...]
    offloaded: tuple[int, ...]
    loss_reduce: str | None
    epilogue: tuple[tuple[str, ...], tuple[str, ...]]
    epilogue_stage: int
    trained: str
    apart: bool
    at_once: set[tuple[int, int]]
    splits: bool

    def lend(self, m: Any) -> None: ...

    def run_epilogue(self, known: Mapping[str, Any]) -> tuple[Any, ...]: ...
