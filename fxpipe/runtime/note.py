"""Where a task failed, told on the exception itself: `stage 2, micro-batch 5, at model.py:41  x = self.fc(x)`.

The exception keeps its type and its traceback, which names the generated line. The comment above that line names the
user's.
"""

from __future__ import annotations

import linecache
import re

from .stage import Stage

_ORIGIN = re.compile(r"\s*# (\S+:\d+  .*)")


def add_note(error: BaseException, stage: Stage, index: int, micro_batch: int, replica: int = 0) -> None:
    """Say on the exception which task it comes from."""
    file, line = type(stage).forward.__code__.co_filename, 0
    traceback = error.__traceback__
    while traceback is not None:  # forward, or the innermost of its pieces, which are in the same file
        if traceback.tb_frame.f_code.co_filename == file:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    task = f"stage {index}, micro-batch {micro_batch}" + (f", replica {replica}" if replica else "")
    origin = user_line(type(stage), line)
    error.add_note(task + (f", at {origin}" if origin else ""))


def user_line(kind: type[Stage], line: int) -> str | None:
    """The user's file, line and code, from the comment above a line of the stage's forward."""
    code = kind.forward.__code__
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno : line]
    comments = (match[1] for match in map(_ORIGIN.match, reversed(lines)) if match)
    return next(comments, None)
