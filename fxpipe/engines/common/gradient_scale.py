"""What the gradients of a step are multiplied by: a GradScaler's scale, divided by the number of steps that add up."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Scale:
    """`times`, a GradScaler's scale, divided by `accumulate`, the number of steps whose gradients add up. The quotient
    is not stored: the scale is a float32, so a third of it would be rounded to float32, even for a loss in float64."""

    times: Tensor | float = 1.0
    accumulate: int = 1


def scaled(root: Tensor, scale: Scale) -> Tensor:
    """`root` times `scale.times`. `root` is the gradient of a loss, divided by `scale.accumulate` already. In one
    process the scale is a tensor, so that the host does not wait for its value; ranks send it to each other as a
    number. Both give the same product."""
    times = scale.times.to(root.device) if isinstance(scale.times, Tensor) else scale.times
    return (root * times).to(root.dtype)
