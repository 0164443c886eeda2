"""A saved package over ranks: each rank has the stages of its own device; the messages are in `messages.json`.

Nothing is captured, planned or generated, so ranks agree only once, on the files; then all calls are of one kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from fxpipe.codegen.package.load_package import bound_stages
from fxpipe.codegen.package.package_files import CONSTANTS, MESSAGES
from fxpipe.engines.common.step_engine import StepScheduler, read_rows
from fxpipe.engines.ranks.failure_attribution import Lost
from fxpipe.engines.ranks.rank_engine import RankScheduler, on_rank
from fxpipe.engines.ranks.rank_group import World
from fxpipe.errors import PackageError, RankError
from fxpipe.ir.program.messages import MessageTable
from fxpipe.ir.program.messages import load as load_table
from fxpipe.ir.schedule.schedule import Action
from fxpipe.pipe.build.compiled.compiled_stages import Backend
from fxpipe.pipe.running_package import RunningPackage
from fxpipe.pipe.saved.loaded_pipe import Loaded, LoadedState, loss_root, opened, with_target
from fxpipe.runtime.stage import sources_of

from .process_group import replica_process_group
from .rank_arguments import CallArguments
from .rank_calls import Header
from .rank_consistency import agree
from .rank_tensors import RankTensors
from .ranks import Ranks, ranked, refuse_copy, refuse_pickle

TEXT = (".py", ".json")  # files whose differences an error shows


@dataclass(kw_only=True)
class LoadedRanksState(LoadedState):
    """What a `LoadedRanks` has besides the model."""

    processes: Ranks


class LoadedRanks(Loaded):
    """A `Loaded` whose devices are the processes of torch.distributed, called as a `RankPipe`."""

    _state: LoadedRanksState
    __deepcopy__, __reduce__ = refuse_copy, refuse_pickle

    @property
    def world(self) -> World:
        """The ranks of this pipe, as `RankPipe.world`."""
        return self._state.processes.world

    @property
    def replica_group(self) -> Any:
        """The process group of the ranks that have the same stages as this one, as `RankPipe.replica_group`."""
        with self._state.processes.together():
            return replica_process_group(self.world, ranked(self._state.live).program.replica_group)

    @property
    def place(self) -> int:
        """The number of this rank, as `RankPipe.place`."""
        return self._state.processes.place


def load_on_rank(
    folder: Path, model: nn.Module, world: World, backend: Backend | None = None, check_inputs: bool = True
) -> LoadedRanks:
    """This rank's part of a package. Raises the error if loading failed on this rank, and RankError if it failed on
    another rank, a rank is lost, or files differ."""
    with world.interrupts:
        return _load_together(folder, model, world, backend, check_inputs)


def _load_together(
    folder: Path, model: nn.Module, world: World, backend: Backend | None, check_inputs: bool
) -> LoadedRanks:
    loaded = list[RunningPackage]()  # one, once it is there: nothing is called before
    ranks = Ranks(
        world, check_inputs, partial(join_failed_call, loaded), lambda: None
    )  # no values of others are gathered here
    error, made = None, None
    try:
        live = opened(folder, model, backend)
        loaded.append(live)
        if (root := loss_root(live.package, model)) is not None:
            raise PackageError(
                f"the loss of this package has tensors of its own, {root}...: with several ranks, make it a function "
                "without tensors, or a part of the model"
            )
        tensors = RankTensors(model, ranks, partial(replica_groups, live))
        state = LoadedRanksState(live=live, bind=partial(bind_on_rank, world), processes=ranks, tensors=tensors)
        made = LoadedRanks(model, state)
    except Exception as failed:
        error = failed
    try:
        agree(world, None if error else text_of(folder), error)
        if error is None:
            ranked(live).join()
            tensors.release_others()
    except Lost as lost:
        raise RankError(str(lost)) from None
    if error is not None:
        raise error
    assert made is not None
    return made


def join_failed_call(
    loaded: Sequence[RunningPackage], _: Header, signatures: CallArguments, error: BaseException
) -> None:
    """Take part in a call that has failed on this rank, so that all ranks learn of the error."""
    live, (args, kwargs, target) = loaded[0], signatures
    inputs = live.package.inputs(*args, **with_target(live.package, kwargs, target))
    ranked(live).run(inputs, live.package.CHUNKS, error=error)


def bind_on_rank(world: World, model: nn.Module, others: Mapping[str, Tensor], package: ModuleType) -> RankScheduler:
    """The scheduler of the stages of a package that are on this rank."""
    found = table_of(package)
    check_ranks(found, world)
    stages, whole, last = bound_stages(package, model, None, others, here={world.label: world.device})
    return on_rank(package.Scheduler, stages, (whole, last), world, found)


def replica_groups(live: RunningPackage, tensors: Mapping[str, Tensor]) -> dict[int, Sequence[str]]:
    """The devices of the stage that uses each tensor, by the tensor's `id`."""
    found: dict[int, Sequence[str]] = {}
    for kind, labels in zip(live.package.STAGES, ranked(live).table.replica_groups, strict=True):
        whole = sources_of(kind)
        for path in kind.states:
            found.setdefault(id(tensors.get(whole.get(path, path))), labels)
    return found


def table_of(package: Any) -> MessageTable:
    """The messages between the stages of a package. Raises PackageError if the package has no table of them, or it does
    not fit the rows of the scheduler."""
    file = Path(next(iter(package.__path__))) / MESSAGES
    if not issubclass(package.Scheduler, StepScheduler):
        raise PackageError(
            "this package was saved after a plain call of a pipe in one process: several ranks need one that was saved "
            "after pipe.step(...), or by a pipe of several ranks"
        )
    if not file.exists():
        raise PackageError(f"{file} is not there: this package is for devices of one process; save it anew")
    try:
        found = load_table(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PackageError(f"{file}: {error}") from None
    labels, schedule = read_rows(package.Scheduler.rows)
    if schedule.pairs:
        raise PackageError(
            "this package has overlapped pairs, which run on devices of one process: save one that was made without "
            "overlap_pairs"
        )
    rows = dict(zip(labels, schedule.devices, strict=True))
    firsts = {label: replica_group[0] for replica_group in found.replica_groups for label in replica_group}
    for label, steps in zip(found.programs.devices, found.programs.rows, strict=True):
        runs = tuple(step.what for step in steps if isinstance(step.what, Action) and step.what.kind != "R")
        if rows.get(firsts.get(label, label)) != runs:
            raise PackageError(f"the rows of {label} in scheduler.py and {MESSAGES} differ: edit both, or neither")
    return found


def check_ranks(table: MessageTable, world: World) -> None:
    """Raise PackageError if the package is not for these ranks."""
    wanted = tuple(dict.fromkeys(label for replica_group in table.replica_groups for label in replica_group))
    if set(wanted) != set(world.labels):
        raise PackageError(
            f"the package is for {len(wanted)} devices, {', '.join(wanted)}, and the ranks are {len(world.labels)}, "
            f"{', '.join(world.labels)}: start as many, or save it from a pipe over such devices"
        )


def text_of(folder: Path) -> str:
    """The text that must be the same on all ranks: all files, and a hash of the constants."""
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*")) if path.suffix in TEXT}
    constants = folder / CONSTANTS
    held = sha256(constants.read_bytes()).hexdigest() if constants.exists() else "none"
    return "\n".join([*(f"{name}\n{text}" for name, text in files.items()), f"{CONSTANTS} {held}"])
