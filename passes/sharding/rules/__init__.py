"""The rule of each op, by its name."""

from __future__ import annotations

from fxpipe.ir.graph import Op, op_name

from ..building import Building
from ..rule import WHOLE, Rule
from .convolutions import CONVOLUTIONS
from .losses import LOSSES, TO_A_NUMBER
from .matmuls import MATMULS
from .pointwise import POINTWISE
from .pools import POOLS
from .samples import SAMPLES
from .views import VIEWS

RULES = {**SAMPLES, **CONVOLUTIONS, **LOSSES, **MATMULS, **POINTWISE, **POOLS, **VIEWS}


def rule_of(op: Op, to_a_number: bool = False) -> Rule:
    """The rule for an op; that it stays whole if there is none. `to_a_number` if it makes a number of a tensor."""
    return (TO_A_NUMBER if to_a_number else RULES).get(op_name(op), WHOLE)
