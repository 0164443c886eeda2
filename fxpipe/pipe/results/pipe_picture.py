"""The picture of a pipe, its stages and the values that move between them: the methods of `Pipe` for it."""

from __future__ import annotations

from dataclasses import fields, replace
from html import escape
from pathlib import Path
from typing import Any

from fxpipe.errors import FxpipeError
from fxpipe.pipe.options.compile_options import Options
from fxpipe.pipe.options.option_forms import shown
from fxpipe.viz.picture_file import Picture
from fxpipe.viz.pictures import of_program


def draw(pipe: Any, path: str | Path) -> Path:
    """Draw the stages, and the values that move between them, into a file, and return the path. The suffix says the
    format, and errors are raised, as by `Timeline.draw`; FxpipeError also before the first call."""
    return _picture(pipe).write(path)


def svg(pipe: Any) -> str | None:
    """What a notebook shows: the stages; None if there are none."""
    return _picture(pipe).svg() if html(pipe) is None else None


def html(pipe: Any) -> str | None:
    """What a notebook shows of a pipe without stages: its options, and why there are none. None if there are some."""
    try:
        pipe.build  # noqa: B018
    except FxpipeError as error:
        told = ", ".join(f"{name}={shown(value)}" for name, value in given(pipe.options).items())
        text = f"Pipe of {type(pipe.model).__name__}: {told}\n{error}"
        return f"<pre>{escape(text, quote=False)}</pre>"
    return None


def given(options: Options) -> dict[str, Any]:
    """The options that are not as they are by themselves."""
    bare = Options(options.devices, options.chunks, replicas=dict.fromkeys(options.devices, ()))
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {
        name: value for name, value in values.items() if name in ("devices", "chunks") or value != getattr(bare, name)
    }


def _picture(pipe: Any) -> Picture:
    return replace(of_program(pipe.build.program), text=pipe.explain)
