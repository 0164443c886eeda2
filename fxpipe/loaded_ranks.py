"""A saved package over ranks: each has the stages of its own device, and what moves between them is in `wires.json`.

Nothing is captured, planned or generated, so ranks agree once, on the files; after that all calls are of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .agreement import agree
from .capture import NO_TARGET
from .codegen.load import bound_stages, tensors_of
from .codegen.package import CONSTANTS, WIRES
from .compiled_stages import Backend
from .engines.distributed import on_rank
from .engines.stepper import Stepper, read_rows
from .engines.world import LEADER, Lost, World
from .errors import PackageError, RankError
from .given import Given
from .ir.schedule import Action
from .ir.wires import Wires
from .ir.wires import load as load_wires
from .loaded import Loaded
from .rank_calls import Header, RankCalls
from .rank_shell import RankShell, scale_of

TEXT = (".py", ".json")  # files that are shown where they differ


class LoadedRanks(RankShell, Loaded):
    """What `fxpipe.load` returns inside a torch.distributed world; see there, `Loaded`, and for calls `RankPipe`."""

    def __init__(self, folder: Path, model: nn.Module, world: World, backend: Backend | None = None) -> None:
        self.__dict__.update(world=world, _calls=RankCalls(world))  # what `_bind` needs
        error = None
        try:
            super().__init__(folder, model, backend)
            if self._root is not None:
                raise PackageError(
                    f"the loss of this package has tensors of its own, {self._root}...: over ranks, it has to be a "
                    "function, or a part of the model"
                )
        except Exception as failed:
            error = failed
        try:
            agree(world, None if error else text_of(folder), error)
            if error is None:
                self.scheduler.share_values()
        except Lost as lost:
            raise RankError(str(lost)) from None
        if error is not None:
            raise error

    def forward_only(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the whole batch, without gradients, on every rank. Raises InputError for another kind
        of call than it was saved for."""

        def call(given: Given) -> tuple[Any, ...]:
            return self._take(self._call_inputs(given[0], given[1]))

        with torch.no_grad():
            return self.package.result(*self._call(call, (args, kwargs, NO_TARGET), self._refuse))

    def _step(
        self, given: Given, loss_fn: Any, outputs: bool, scaler: torch.amp.GradScaler | None, timeline: bool
    ) -> tuple[Any, ...]:
        """As `RankPipe.step`. Of the loss function nothing is needed: no package over ranks has tensors of it."""

        def call(given: Given) -> tuple[Any, ...]:
            return self._take(self._step_inputs(*given, outputs))

        header = Header(scale=scale_of(scaler, self.world.device), timeline=timeline)
        found: tuple[Any, ...] = self._call(call, given, self._refuse, header)
        return found

    def _take(self, inputs: Any) -> tuple[Any, ...]:
        """This rank's part of a call."""
        found, self.__dict__["timeline"] = self._calls.take(self.scheduler, inputs, self.package.CHUNKS)
        return found

    def _refuse(self, _: Header, looks: Given, error: BaseException) -> None:
        """Take part in a call that has failed here, so that all ranks know."""
        args, kwargs, target = looks
        inputs = self.package.inputs(*args, **self._named(kwargs, target))
        self.scheduler.run(inputs, self.package.CHUNKS, error=error)

    # The package ------------------------------------------------------------------------------------------------------

    def _bind(self, others: Mapping[str, Tensor]) -> None:
        found = wires_of(self.package)
        check_ranks(found, self.world)
        here = {self.world.label: self.world.device}
        stages, whole = bound_stages(self.package, self.model, None, others, here=here)
        made = on_rank(self.package.Scheduler, stages, whole, self.world, found)
        self.__dict__.update(scheduler=made, _others=others)

    def on_ranks(self, wanted: Callable[[Sequence[str]], bool]) -> dict[str, Tensor]:
        tensors, crews = tensors_of(self.model), dict[int, Sequence[str]]()
        for kind, labels in zip(self.package.STAGES, self.scheduler.wires.crews, strict=True):
            for path in kind.states:
                crews.setdefault(id(tensors.get(path)), labels)
        leader = (self.world.labels[LEADER],)
        return {path: x for path, x in tensors.items() if wanted(crews.get(id(x), leader))}


def wires_of(package: Any) -> Wires:
    """What moves between the stages of a package. Raises PackageError where nobody knows."""
    file = Path(next(iter(package.__path__))) / WIRES
    if not issubclass(package.Scheduler, Stepper):
        raise PackageError(
            "this package was saved after a call of a pipe in one process; over ranks, save one after pipe.step(...), "
            "or from a pipe over ranks"
        )
    if not file.exists():
        raise PackageError(f"{file} is not there: this package is for devices of one process; save it anew")
    try:
        found = load_wires(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PackageError(f"{file}: {error}") from None
    rows, firsts = read_rows(package.Scheduler.rows), {label: crew[0] for crew in found.crews for label in crew}
    for label, steps in zip(found.programs.devices, found.programs.rows, strict=True):
        runs = tuple(step.what for step in steps if isinstance(step.what, Action) and step.what.kind != "R")
        if rows.get(firsts.get(label, label)) != runs:
            raise PackageError(f"the rows of {label} in scheduler.py and {WIRES} differ: edit both, or neither")
    return found


def check_ranks(wires: Wires, world: World) -> None:
    """Raise PackageError if the package is not for these ranks."""
    wanted = tuple(dict.fromkeys(label for crew in wires.crews for label in crew))
    if set(wanted) != set(world.labels):
        raise PackageError(
            f"the package is for {len(wanted)} devices, {', '.join(wanted)}, and the ranks are {len(world.labels)}, "
            f"{', '.join(world.labels)}: start as many, or save it from a pipe over such devices"
        )


def text_of(folder: Path) -> str:
    """What ranks must have the same."""
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*")) if path.suffix in TEXT}
    constants = folder / CONSTANTS
    held = sha256(constants.read_bytes()).hexdigest() if constants.exists() else "none"
    return "\n".join([*(f"{name}\n{text}" for name, text in files.items()), f"{CONSTANTS} {held}"])
