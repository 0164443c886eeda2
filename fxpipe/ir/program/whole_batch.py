"""What runs once on the whole batch, beside the stages: programs of one stage each."""

from __future__ import annotations

from dataclasses import dataclass

from .program import Program


@dataclass(frozen=True)
class WholeBatch:
    """The programs that run on the whole batch.

    - `totals`: before it is cut: what micro-batches must know of it; or None.
    - `epilogue`: after it is joined: what needs all of it; or None.
    """

    totals: Program | None = None
    epilogue: Program | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(program for program in (self.totals, self.epilogue) if program is not None)


ALONE = WholeBatch()  # nothing does
