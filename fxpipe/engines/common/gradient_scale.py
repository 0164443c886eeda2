"""What the gradients of a step are multiplied by: a GradScaler's scale, divided by the number of steps that add up."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scale:
    """`times`, a GradScaler's scale, divided by `accumulate`. They are kept apart, as a scale is a float32: its third
    would be one of a float32, too, whatever the type of the loss."""

    times: Tensor | float = 1.0
    accumulate: int = 1


def scaled(root: Tensor, scale: Scale) -> Tensor:
    """The gradient of a loss, which is divided by `scale.accumulate` already, times the scale: the same number in one
    process, where the scale is a tensor and no host waits for it, and over ranks, which tell each other a number."""
    times = scale.times.to(root.device) if isinstance(scale.times, Tensor) else scale.times
    return (root * times).to(root.dtype)
