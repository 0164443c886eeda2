"""The rule of each op, by its name."""

from __future__ import annotations

from fxpipe.ir.graph.graph import Op, op_name
from fxpipe.passes.sharding.rules.cells import CELLS
from fxpipe.passes.sharding.rules.losses import TO_A_NUMBER, UNREDUCED
from fxpipe.passes.sharding.rules.matmuls import ATTENTION, MATMULS
from fxpipe.passes.sharding.rules.norms import NORMS
from fxpipe.passes.sharding.rules.pointwise import ELEMENTWISE, SAMPLES
from fxpipe.passes.sharding.rules.sliding_windows import CONVOLUTIONS, POOLS
from fxpipe.passes.sharding.rules.views import INDEXING, JOINS, SHAPES
from fxpipe.passes.sharding.sharding_rule import WHOLE, Rule

RULES = {
    **SAMPLES, **ATTENTION, **CELLS, **CONVOLUTIONS, **INDEXING, **JOINS, **UNREDUCED, **MATMULS, **NORMS,
    **ELEMENTWISE, **POOLS, **SHAPES,
}  # fmt: skip


def rule_of(op: Op, to_a_number: bool = False) -> Rule:
    """The rule for an op, or `WHOLE` if it has none. `to_a_number`: whether it reduces a tensor to a number."""
    return (TO_A_NUMBER if to_a_number else RULES).get(op_name(op), WHOLE)
