"""How fast a device multiplies matrices, by element type: the largest part of what training costs, and the one in which
devices and element types differ most. An A100 does 19.5 Tflop/s in f32, 156 in tf32, 312 in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Element types of products, each with that of the tensors in memory.
STORED = {"f64": "f64", "f32": "f32", "tf32": "f32", "bf16": "bf16", "f16": "f16", "f8": "bf16"}


@dataclass(frozen=True)
class MatrixSpeed:
    """How fast a device multiplies matrices of one element type.

    - `dtype`: "f64", "f32", "tf32" (float32 with 10 bits of mantissa in products), "bf16", "f16" or "f8" (float8 in
      products).
    - `peak`: floating-point operations per second, as the maker says (without sparsity).
    - `efficiency`: the share of the peak that large products reach.
    """

    dtype: str
    peak: float
    efficiency: float = 1.0

    @property
    def reached(self) -> float:
        """Floating-point operations per second of large products."""
        return self.peak * self.efficiency


def check_speeds(label: str, speeds: Sequence[MatrixSpeed]) -> None:
    """Raise ValueError if these cannot be the speeds of the device `label`."""
    for at, one in enumerate(speeds):
        if one.dtype not in STORED:
            raise ValueError(f"device {label} multiplies {one.dtype!r}; write one of {', '.join(STORED)}")
        if one.dtype in {other.dtype for other in speeds[:at]}:
            raise ValueError(f"device {label} has two speeds for {one.dtype}")
        if one.peak <= 0:
            raise ValueError(f"device {label} has a figure that is not positive: {one}")
        if not 0 < one.efficiency <= 1:
            raise ValueError(f"device {label} reaches {one.efficiency} of its peak; write a share of at most 1: {one}")
