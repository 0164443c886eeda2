"""What passes may read beside the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxpipe.ir.plan.plan import Plan


@dataclass(frozen=True)
class PassContext:
    """`samples` has, of each value that can be cut, the dimension that carries the samples, or None if the value is the
    same for all; it is None where no step is to run on replicas. `segmented`: ops were placed one by one, so a device
    has many stages, which are segments of stages of the pipeline."""

    plan: Plan
    samples: Mapping[str, int | None] | None = None
    segmented: bool = False
