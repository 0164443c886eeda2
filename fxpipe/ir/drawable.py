"""What has a picture: `draw` writes it to a file, and a notebook shows it.

Pictures are made in `fxpipe.viz`, which stands above the types of this room: it registers with `picture` how each of
them is drawn. Types of the rooms above override `Drawable._picture`.
"""

from __future__ import annotations

from functools import singledispatch
from importlib import import_module
from pathlib import Path
from typing import Protocol

PICTURES = "fxpipe.viz.pictures"  # imported with the first picture


class Picture(Protocol):
    """A picture that is drawn when it is asked for."""

    def svg(self) -> str:
        """The text of an SVG file."""

    def write(self, path: str | Path) -> Path:
        """Write the picture in the format that the path's suffix says."""


@singledispatch
def picture(value: object) -> Picture:
    """The picture of a value. Raises TypeError if its type has none."""
    raise TypeError(f"{type(value).__name__} has no picture")


class Drawable:
    """A value with a picture."""

    def draw(self, path: str | Path) -> Path:
        """Draw it into a file, and return the path. The suffix says the format: `.svg`; `.html`, a page that needs no
        other file, with what `print` shows below the picture; or `.png`, if cairosvg is installed. Raises PlanError for
        another suffix, FxpipeError if there is no cairosvg, and OSError if the file cannot be written."""
        return self._picture().write(path)

    def _repr_svg_(self) -> str | None:
        """What a notebook shows."""
        return self._picture().svg()

    def _picture(self) -> Picture:
        import_module(PICTURES)
        return picture(self)
