"""Notes on exceptions that say where a task failed: `stage 2, micro-batch 5, at model.py:41  x = self.fc(x)`.

The exception keeps its type and its traceback, which has the generated line; the comment above that line names the
user's line. In backward by autograd the note names the user's innermost line in the traceback, such as one in an
autograd function; where no generated line runs either, the range of lines that the stage computes.
"""

from __future__ import annotations

import linecache
import re
from pathlib import Path

import torch

from fxpipe.errors import file_name

from .stage import Stage

# i and j are the micro-batches of an overlapped pair.
_ORIGIN = re.compile(r"\s*# (?:[ij]: )?(gradient of )?(\S+:\d+  .*|the loss function)")
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
            line, users = traceback.tb_lineno, ""
        elif not name.startswith((*_NOT_USERS, str(Path(file).parent))):  # nor the generated scheduler's
            code = linecache.getline(name, traceback.tb_lineno).strip()
            users = f"{file_name(name)}:{traceback.tb_lineno}  {code}".rstrip()
        traceback = traceback.tb_next
    task = f"stage {index}, micro-batch {micro_batch}" + (f", replica {replica}" if replica else "")
    gradient, origin = _comment(type(stage), line)
    if backward and (gradient or origin is None):
        task += ", in backward"
        origin = users or origin
    of = "" if origin or not backward else _extent(type(stage))
    error.add_note(task + (f", at {origin}" if origin else f" of {of}" if of else ""))


def user_line(kind: type[Stage], line: int) -> str | None:
    """The user's file, line and code, from the comment above a line of the stage."""
    return _comment(kind, line)[1]


def _comment(kind: type[Stage], line: int) -> tuple[bool, str | None]:
    """Whether a line of the stage computes a gradient; and the user's line."""
    code = kind.forward.__code__
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno : line]
    match = next((match for match in map(_ORIGIN.match, reversed(lines)) if match), None)
    return (match[1] is not None, match[2]) if match else (False, None)


def in_pairs_forward(error: BaseException) -> bool:
    """Whether the error comes from a line of forward in the code of an overlapped pair."""
    found, traceback = False, error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_name.startswith("forward_beside_backward_"):
            lines = linecache.getlines(code.co_filename)[code.co_firstlineno : traceback.tb_lineno]
            comments = (line.split() for line in reversed(lines) if line.lstrip().startswith("# "))
            found = next(comments, ["#", "j:"])[1] == "i:"
        traceback = traceback.tb_next
    return found


def _extent(kind: type[Stage]) -> str:
    """The user's first and last line that the stage computes."""
    code = kind.forward.__code__
    comments = map(_ORIGIN.match, linecache.getlines(code.co_filename)[code.co_firstlineno :])
    lines = [match[2] for match in comments if match and not match[1]]
    return " ... ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else ""
