"""In which element types a script trains, so that its bytes are those that were planned.

A plan in bf16 counts, if nothing else is said, 16 bytes for each parameter: itself and its gradient in bf16, a master
copy and Adam's moments in f32. Parameters in f32 under torch.autocast take the same 16, and nobody has to write an
optimizer with master copies. A plan with fewer bytes is for a model that is converted.
"""

from __future__ import annotations

from typing import NamedTuple

from fxpipe.errors import PlanError
from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.plan.model_states import HALF
from fxpipe.pipe.results.planned import Planned

MASTER_COPIES = 8  # bytes in memory for each byte of parameters in 16 bits, with a master copy and moments in f32
ADAM, MOMENTUM = 4, 3  # the same for a parameter, its gradient, and two moments or one


class Precision(NamedTuple):
    """How a script computes. Of `autocast` and `convert` at most one is given: torch's name of an element type.

    - `products`: whether products of f32 matrices are in TF32.
    - `scaler`: whether the loss is scaled, as gradients in f16 need it.
    - `floats`: the element type of inputs; None: that of the planned ones.
    """

    autocast: str = ""
    convert: str = ""
    products: bool = False
    scaler: bool = False
    floats: str | None = None


def precision_of(planned: Planned, dtype: str | None) -> Precision:
    """The types for a plan that was made with `dtype`. Raises PlanError if a script cannot train in them."""
    if dtype is None:
        return Precision()
    if dtype == "tf32":
        return Precision(products=True)
    if dtype == "f8":
        raise PlanError(
            "the plan has products in float8, for which a model needs layers of a library: write --dtype bf16"
        )
    gathers = planned.layers.optimizer_sharding == "zero3"  # autocast would keep casts of gathered parameters
    if dtype in HALF and planned.copies >= MASTER_COPIES and not gathers:
        return Precision(autocast=DTYPES[dtype].torch, scaler=dtype == "f16", floats="f32")
    if dtype == "f16":
        raise PlanError(
            "the plan has parameters in float16 without a copy in f32, whose gradients no GradScaler can unscale: "
            "leave out --parameter-copies and --optimizer-sharding zero3, or write --dtype bf16"
        )
    return Precision(convert=DTYPES[dtype].torch)


def optimizer_of(planned: Planned) -> tuple[str, bool]:
    """The optimizer with as many bytes as the plan counts, as Python, and whether replicas share out its state."""
    sharding, stages = planned.layers.optimizer_sharding, planned.layers.stages
    shared = planned.layers.shards_optimizer and sharding == "zero1"
    zero1 = shared and all(stage.tensor_parallel == 1 for stage in stages)  # else each parameter has one owner
    kind, rest = ("AdamW", "lr=1e-3") if planned.copies >= ADAM else ("SGD", "lr=1e-2")
    rest += ", momentum=0.9" if MOMENTUM <= planned.copies < ADAM else ""
    if not zero1:
        return f"torch.optim.{kind}(pipe.parameters(), {rest})", False
    return f"ZeroRedundancyOptimizer(pipe.parameters(), torch.optim.{kind}, pipe.replica_group, {rest})", True
