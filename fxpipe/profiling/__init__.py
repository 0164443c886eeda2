"""Graph -> Profile: what each op costs, measured or estimated."""

from .estimate import estimate
from .measure import measure
from .other_kinds import on_kinds

__all__ = ["estimate", "measure", "on_kinds"]
