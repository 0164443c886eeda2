"""The rule of each op, by its name."""

from __future__ import annotations

from fxpipe.ir.graph import Op, op_name

from ..building import Building
from ..rule import WHOLE, Rule
from .attention import ATTENTION
from .batch_norms import BATCH_NORMS
from .cells import CELLS
from .convolutions import CONVOLUTIONS
from .indexing import INDEXING
from .joins import JOINS
from .losses import LOSSES, TO_A_NUMBER
from .matmuls import MATMULS
from .norms import NORMS
from .pointwise import POINTWISE
from .pools import POOLS
from .samples import SAMPLES
from .softmaxes import SOFTMAXES
from .views import VIEWS

RULES = {
    **SAMPLES, **ATTENTION, **BATCH_NORMS, **CELLS, **CONVOLUTIONS, **INDEXING, **JOINS, **LOSSES, **MATMULS, **NORMS,
    **POINTWISE, **POOLS, **SOFTMAXES, **VIEWS,
}  # fmt: skip


def rule_of(op: Op, to_a_number: bool = False) -> Rule:
    """The rule for an op; that it stays whole if there is none. `to_a_number` if it makes a number of a tensor."""
    return (TO_A_NUMBER if to_a_number else RULES).get(op_name(op), WHOLE)
