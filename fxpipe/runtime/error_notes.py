"""Notes on exceptions that say where a task failed: `stage 2, micro-batch 5, at model.py:41  x = self.fc(x)`.

The exception keeps its type and its traceback, which has the generated line; the comment above that line names the
user's line. In backward no generated line runs: there the note names the user's innermost line in the traceback, such
as one in an autograd function, or else the range of lines that the stage computes.
"""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import torch

from fxpipe.errors import file_name

from .stage import Stage

_ORIGIN = re.compile(r"\s*# (\S+:\d+  .*)")
_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")


def add_note(
    error: BaseException, stage: Stage, index: int, micro_batch: int, replica: int = 0, backward: bool = False
) -> None:
    """Note on the exception which task it comes from. `backward`: whether it comes from the task's backward."""
    file, line, users = type(stage).forward.__code__.co_filename, 0, ""
    traceback = error.__traceback__
    while traceback is not None:  # finds the innermost frame in the stage's file: forward, or one of its pieces
        name = traceback.tb_frame.f_code.co_filename
        if name == file:
            line = traceback.tb_lineno
        elif not name.startswith((*_NOT_USERS, str(Path(file).parent))):  # nor the generated scheduler's
            code = linecache.getline(name, traceback.tb_lineno).strip()
            users = f"{file_name(name)}:{traceback.tb_lineno}  {code}".rstrip()
        traceback = traceback.tb_next
    task = f"stage {index}, micro-batch {micro_batch}" + (f", replica {replica}" if replica else "")
    origin = user_line(type(stage), line)
    if backward and origin is None:
        task += ", in backward"
        origin = users
    of = "" if origin or not backward else _extent(type(stage))
    error.add_note(task + (f", at {origin}" if origin else f" of {of}" if of else ""))


def user_line(kind: type[Stage], line: int) -> str | None:
    """The user's file, line and code, from the comment above a line of the stage's forward."""
    code = kind.forward.__code__
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno : line]
    comments = (match[1] for match in map(_ORIGIN.match, reversed(lines)) if match)
    return next(comments, None)


def _extent(kind: type[Stage]) -> str:
    """The user's first and last line that the stage computes."""
    code = kind.forward.__code__
    comments = map(_ORIGIN.match, linecache.getlines(code.co_filename)[code.co_firstlineno :])
    lines = [match[1] for match in comments if match]
    return " ... ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else ""
