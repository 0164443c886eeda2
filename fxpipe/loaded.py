"""A saved package that runs, without capture or planning: what is in the files is what happens."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from torch import nn

from .codegen.load import bind, load_package, unload
from .engines.local import Pipeline
from .errors import InputError
from .runtime import Stage
from .shell import Shell


class Loaded(Shell):
    """What `fxpipe.load` returns; see there."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        super().__init__(model)
        package = load_package(folder)
        forget = weakref.finalize(self, unload, package)
        try:
            scheduler = bind(package, model)
        except BaseException:
            forget()
            raise
        self.__dict__.update(package=package, scheduler=scheduler, _forget=forget)
        self.train(package.TRAINING)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the whole batch. Raises InputError for another kind of call than it was saved for."""
        if self.training != self.package.TRAINING:
            kind = "training" if self.package.TRAINING else "evaluation"
            raise InputError(f"this package was saved for {kind}; save another one after pipe.train() or pipe.eval()")
        try:
            inputs = self.package.inputs(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise InputError(f"this package was saved for another kind of call: {error}") from None
        return self.package.result(*self.scheduler.run(inputs, self.package.CHUNKS))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, as modules; `.source` is the text of the file each came from."""
        scheduler: Pipeline = self.scheduler
        return scheduler.stages

    def close(self) -> None:
        """End the worker threads. A pipe that is garbage collected closes itself."""
        self.scheduler.close()
        self._forget()
