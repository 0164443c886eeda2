"""The formats of pictures. All pictures are drawn as SVG; this makes a file of one, in the format of its suffix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from fxpipe.errors import FxpipeError, PlanError, did_you_mean

from .report_page import document
from .svg_elements import FONT, MONO, THEMES

PNG_SCALE = 2  # pixels of a .png for each of the picture


@dataclass(frozen=True)
class Picture:
    """A picture that is drawn when it is asked for.

    - `title`: of its page.
    - `svg`: returns the text of the SVG file.
    - `text`: returns what stands below the picture in a page.
    """

    title: str
    svg: Callable[[], str]
    text: Callable[[], str]

    def write(self, path: str | Path) -> Path:
        """Write the file and return its path. Raises as `Drawable.draw`."""
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix not in FORMATS:
            known = ", ".join(FORMATS)
            ends = f"ends with {path.suffix!r}" if suffix else "has no suffix"
            raise PlanError(f"{str(path)!r} {ends}: a picture is one of {known}{did_you_mean(suffix, FORMATS)}")
        path.write_bytes(FORMATS[suffix](self))
        return path


def _svg(picture: Picture) -> bytes:
    return picture.svg().encode()


def _page(picture: Picture) -> bytes:
    light, dark = THEMES["light"], THEMES["dark"]
    style = f"""\
body {{ font-family: {FONT}; margin: 2rem auto; max-width: 1250px; padding: 0 1rem; {_colors(light)} }}
.picture {{ overflow-x: auto; }}
pre {{ font-family: {MONO}; font-size: 0.8rem; overflow-x: auto; }}
@media (prefers-color-scheme: dark) {{ body {{ {_colors(dark)} }} }}"""
    body = f'<div class="picture">\n{picture.svg()}</div>\n<pre>{escape(picture.text())}</pre>'
    return document(picture.title, style, body).encode()


def _colors(theme: dict[str, str]) -> str:
    return f"background: {theme['page']}; color: {theme['ink']};"


def _png(picture: Picture) -> bytes:
    """The picture as on a light page."""
    try:
        import cairosvg
    except ImportError:
        raise FxpipeError("a .png needs cairosvg: pip install 'fxpipe[png]'; .svg and .html need nothing") from None
    except OSError as error:  # the library that it loads
        raise FxpipeError(f"a .png needs the library cairo ({error}); .svg and .html need nothing") from None
    return bytes(cairosvg.svg2png(bytestring=picture.svg().encode(), scale=PNG_SCALE))


FORMATS: dict[str, Callable[[Picture], bytes]] = {".svg": _svg, ".html": _page, ".png": _png}
