"""The picture of a pipe: its stages, and the values that move between them."""

from __future__ import annotations

from dataclasses import fields, replace
from html import escape
from typing import Any

from fxpipe.errors import FxpipeError
from fxpipe.ir.drawable import Drawable
from fxpipe.pipe.build.build import Build
from fxpipe.pipe.options.compile_options import Options
from fxpipe.pipe.options.option_forms import shown
from fxpipe.viz.picture_file import Picture
from fxpipe.viz.pictures import of_program


class PipePicture(Drawable):
    """A pipe as something to look at."""

    model: Any

    @property
    def build(self) -> Build:
        """As of `Pipe`."""
        raise NotImplementedError

    @property
    def options(self) -> Options:
        """As of `Pipe`."""
        raise NotImplementedError

    def explain(self) -> str:
        """As of `Pipe`."""
        raise NotImplementedError

    def _picture(self) -> Picture:
        return replace(of_program(self.build.program), text=self.explain)

    def _repr_svg_(self) -> str | None:
        return super()._repr_svg_() if self._repr_html_() is None else None

    def _repr_html_(self) -> str | None:
        """What a notebook shows of a pipe without stages to draw: why there are none, and the options."""
        try:
            self.build  # noqa: B018
        except FxpipeError as error:
            told = ", ".join(f"{name}={shown(value)}" for name, value in given(self.options).items())
            text = f"Pipe of {type(self.model).__name__}: {told}\n{error}"
            return f"<pre>{escape(text, quote=False)}</pre>"
        return None


def given(options: Options) -> dict[str, Any]:
    """The options that are not as they are by themselves."""
    bare = Options(options.devices, options.chunks, replicas=dict.fromkeys(options.devices, ()))
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {
        name: value for name, value in values.items() if name in ("devices", "chunks") or value != getattr(bare, name)
    }
