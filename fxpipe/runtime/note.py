"""Where a task failed, told on the exception itself: `stage 2, micro-batch 5, at model.py:41  x = self.fc(x)`.

The exception keeps its type and its traceback, which names the generated line. The comment above that line names the
user's.
"""

from __future__ import annotations

import linecache
import re
from types import TracebackType

from .stage import Stage

_ORIGIN = re.compile(r"\s*# (\S+:\d+  .*)")


def add_note(error: BaseException, stage: Stage, index: int, micro_batch: int, replica: int = 0) -> None:
    """Say on the exception which task it comes from."""
    task = f"stage {index}, micro-batch {micro_batch}" + (f", replica {replica}" if replica else "")
    origin = user_line(error.__traceback__, stage)
    error.add_note(task + (f", at {origin}" if origin else ""))


def user_line(traceback: TracebackType | None, stage: Stage) -> str | None:
    """The user's file, line and code, from the comment above the line of the stage where the error passed."""
    code = type(stage).forward.__code__
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            lines = linecache.getlines(code.co_filename)[code.co_firstlineno : traceback.tb_lineno]
            comments = (match[1] for match in map(_ORIGIN.match, reversed(lines)) if match)
            return next(comments, None)
        traceback = traceback.tb_next
    return None
