"""The rule of each op, by its name."""

from __future__ import annotations

from fxpipe.ir.graph.graph import Op, op_name
from fxpipe.passes.sharding.rules.attention import ATTENTION
from fxpipe.passes.sharding.rules.cells import CELLS
from fxpipe.passes.sharding.rules.indexing import INDEXING, JOINS
from fxpipe.passes.sharding.rules.losses import LOSSES, TO_A_NUMBER
from fxpipe.passes.sharding.rules.matmuls import MATMULS
from fxpipe.passes.sharding.rules.norms import NORMS
from fxpipe.passes.sharding.rules.per_sample import SAMPLES
from fxpipe.passes.sharding.rules.pointwise import ELEMENTWISE
from fxpipe.passes.sharding.rules.sliding_windows import CONVOLUTIONS, POOLS
from fxpipe.passes.sharding.rules.views import SHAPES
from fxpipe.passes.sharding.sharding_rule import WHOLE, Rule

RULES = {
    **SAMPLES, **ATTENTION, **CELLS, **CONVOLUTIONS, **INDEXING, **JOINS, **LOSSES, **MATMULS, **NORMS, **ELEMENTWISE,
    **POOLS, **SHAPES,
}  # fmt: skip


def rule_of(op: Op, to_a_number: bool = False) -> Rule:
    """The rule for an op; that it stays whole if there is none. `to_a_number` if it makes a number of a tensor."""
    return (TO_A_NUMBER if to_a_number else RULES).get(op_name(op), WHOLE)
