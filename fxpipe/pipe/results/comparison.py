"""What comparisons return: a table, and the timelines that it compares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fxpipe.ir.drawable import Drawable
from fxpipe.ir.timeline import Timeline
from fxpipe.viz import comparison_picture
from fxpipe.viz.picture_file import Picture


@dataclass(frozen=True)
class Comparison(Drawable):
    """Timelines beside each other. Print with `str`, which is a table; `draw` puts the timelines one below the other.

    - `table`: what is printed.
    - `timelines`: each with its name.
    """

    table: str
    timelines: tuple[tuple[str, Timeline], ...]

    def __str__(self) -> str:
        return self.table

    __repr__ = __str__  # what a notebook's cell or the interpreter shows

    def _picture(self) -> Picture:
        title = ", ".join(name for name, _ in self.timelines)
        return Picture(title, partial(comparison_picture.draw, self.timelines, title), partial(str, self))
