"""Graph -> Profile: what each op costs, measured or estimated."""

from .estimate import estimate
from .measure import measure

__all__ = ["estimate", "measure"]
