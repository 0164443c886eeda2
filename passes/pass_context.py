"""The data that passes may read besides the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fxpipe.ir.operators.collective_patterns import CollectivePattern
from fxpipe.ir.plan.plan import Plan


@dataclass(frozen=True)
class PassContext:
    """The data that passes may read besides the program.

    - `plan`: the plan.
    - `samples`: for each value that can be cut, the dimension of its samples, or None if the value is the same for all
      samples. None altogether if no step runs on replicas.
    - `segmented`: whether ops were placed one by one; then a device has many stages, which are segments of the stages
      of the pipeline.
    - `backward`: who computes gradients: "autograd", or generated "code".
    - `owners`: by path, the device that owns a tensor of the model; one that is not named belongs to the first stage
      that uses it.
    - `sizes`: a number for each symbolic size of a micro-batch, to weigh what is kept.
    - `collectives`: ops placed one by one that may be collectives of ranks.
    - `traces`: those of ops that other lowerings of the same graph have made; those that a pass makes are added.
    """

    plan: Plan
    samples: Mapping[str, int | None] | None = None
    segmented: bool = False
    backward: str = "autograd"
    owners: Mapping[str, str] = field(default_factory=dict)
    collectives: tuple[CollectivePattern, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    traces: dict[Any, Any] = field(default_factory=dict)
