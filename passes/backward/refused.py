"""Why a stage has no backward as code."""

from __future__ import annotations


class Refused(Exception):
    """The stage cannot be traced, for the reason that this says. `by_ops`: what ops it has tells that already, whatever
    the sizes are."""

    def __init__(self, reason: str, by_ops: bool = False) -> None:
        super().__init__(reason)
        self.by_ops = by_ops
