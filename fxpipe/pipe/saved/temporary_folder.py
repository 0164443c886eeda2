"""The temporary folder of a pipe, for the files that it generates.

tempfile.TemporaryDirectory warns when it is collected, and in a forked child removes the files of the parent.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import weakref
from pathlib import Path


class Folder:
    """A temporary folder, made at its first use. It is removed with this object, or at the end of the process that made
    it. A forked child makes its own folder, and does not remove that of its parent."""

    def __init__(self) -> None:
        self._made: tuple[int, weakref.finalize[..., Folder]] | None = None
        self.name = Path()
        self._numbers = itertools.count()

    def new(self) -> Path:
        """A new path inside the folder. Nothing exists at the path yet."""
        process = os.getpid()
        if self._made is None or self._made[0] != process:
            self.name = Path(tempfile.mkdtemp(prefix="fxpipe-"))
            self._made = process, weakref.finalize(self, remove, self.name, process)
        return self.name / str(next(self._numbers))

    def remove(self) -> None:
        """Remove the folder with its contents."""
        if self._made is not None:
            self._made[1]()


def remove(path: Path, process: int) -> None:
    """Remove a folder, if this is the process that made it."""
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)
