"""The rule of each op, by its name."""

from __future__ import annotations

from fxpipe.ir.graph import Op, op_name
from fxpipe.passes.sharding.rule import WHOLE, Rule
from fxpipe.passes.sharding.rules.attention import ATTENTION
from fxpipe.passes.sharding.rules.batch_norms import BATCH_NORMS
from fxpipe.passes.sharding.rules.cells import CELLS
from fxpipe.passes.sharding.rules.convolutions import CONVOLUTIONS
from fxpipe.passes.sharding.rules.indexing import INDEXING
from fxpipe.passes.sharding.rules.joins import JOINS
from fxpipe.passes.sharding.rules.losses import LOSSES, TO_A_NUMBER
from fxpipe.passes.sharding.rules.matmuls import MATMULS
from fxpipe.passes.sharding.rules.multi_head import MULTI_HEAD
from fxpipe.passes.sharding.rules.norms import NORMS
from fxpipe.passes.sharding.rules.pointwise import ELEMENTWISE
from fxpipe.passes.sharding.rules.pools import POOLS
from fxpipe.passes.sharding.rules.samples import SAMPLES
from fxpipe.passes.sharding.rules.softmaxes import SOFTMAXES
from fxpipe.passes.sharding.rules.views import SHAPES

RULES = {
    **SAMPLES, **ATTENTION, **BATCH_NORMS, **CELLS, **CONVOLUTIONS, **INDEXING, **JOINS, **LOSSES, **MATMULS,
    **MULTI_HEAD, **NORMS,
    **ELEMENTWISE, **POOLS, **SOFTMAXES, **SHAPES,
}  # fmt: skip


def rule_of(op: Op, to_a_number: bool = False) -> Rule:
    """The rule for an op; that it stays whole if there is none. `to_a_number` if it makes a number of a tensor."""
    return (TO_A_NUMBER if to_a_number else RULES).get(op_name(op), WHOLE)
