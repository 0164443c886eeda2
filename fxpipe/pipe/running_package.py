"""A package that runs: written, imported, compiled if that is asked for, and bound to tensors, again where these are
others than before. Every kind of pipe runs one of these.

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

from .build.compiled_stages import Backend, compile_stages
from .build.phase_timing import timed

Scheduler = Pipeline | StepScheduler | RankScheduler
Bind = Callable[[ModuleType], Scheduler]


class RunningPackage:
    """The package in a folder, where its `files` are written first if they are given, and its scheduler. `version` is
    whatever tells its owner which tensors that has."""

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
        """Run a scheduler that holds other tensors from now on. If none can be made, nothing changes."""
        made = make(self.package)
        self.end_workers()
        self._scheduler, self.version = made, version

    def end_workers(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()

    def close(self) -> None:
        """End the worker threads, and forget the package; what still uses it keeps it alive."""
        self.end_workers()
        self._forget()
