"""A package that runs: written, imported, compiled if requested, and bound to tensors; bound again when the tensors
change. Every kind of pipe runs one of these.

    files ─write─▶ folder ─load─▶ package ─compile─▶ package.STAGES ─bind─▶ scheduler
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from fxpipe.codegen.package.load_package import load_package, unload
from fxpipe.codegen.package.package_files import write
from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.engines.local.forward_engine import Pipeline
from fxpipe.engines.ranks.rank_engine import RankScheduler

from .build.compiled.compiled_stages import Backend, compile_stages
from .progress import timed

Scheduler = Pipeline | StepScheduler | RankScheduler
Bind = Callable[[ModuleType], Scheduler]


class RunningPackage:
    """The package in a folder, and its scheduler. `files`, if given, are written into the folder first. `version` is
    set by the owner, to know which tensors the scheduler has."""

    def __init__(self, folder: Path, files: Mapping[str, str] | None = None, backend: Backend | None = None) -> None:
        self._scheduler: Scheduler | None = None
        self.version: object = None
        with timed("loading"):
            if files is not None:
                write(files, folder)
            self.package = load_package(folder)
            self._forget = weakref.finalize(self, unload, self.package)
            if backend is not None:
                try:
                    compile_stages(self.package, backend)
                except BaseException:
                    self._forget()
                    raise

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that `bind` has made."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def step_scheduler(self) -> StepScheduler:
        """The scheduler of a package for steps."""
        assert isinstance(self._scheduler, StepScheduler)
        return self._scheduler

    @property
    def bound(self) -> bool:
        return self._scheduler is not None

    def bind(self, make: Bind, version: object = None) -> None:
        """Replace the scheduler by one with other tensors. If `make` fails, nothing changes."""
        made = make(self.package)
        self.end_workers()
        self._scheduler, self.version = made, version

    def end_workers(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()

    def close(self) -> None:
        """End the worker threads and unload the package; objects that still use it keep it alive."""
        self.end_workers()
        self._forget()
