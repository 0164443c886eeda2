"""What a pipe asks of the processes that train its model. This one process answers for itself (`Alone`); the ranks of
torch.distributed answer together (`Ranks`, in `ranks/ranks.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fxpipe.codegen.package.load_package import tensors_of
from fxpipe.engines.common.step_timer import take_step
from fxpipe.ir.timeline import Timeline

from .fork_lock import Lock
from .live import Live
from .ranks.rank_arguments import Given


@dataclass(frozen=True)
class StepOptions:
    """How a step is run; see `Pipe.step`."""

    scaler: torch.amp.GradScaler | None
    accumulate: int
    timeline: bool


class Processes(Protocol):
    """The processes that train a model, as one of them sees them.

    - `leads`, `collect`, `collect_all`: see the methods of `DropInModule`.
    - `call`: what a call returns that all processes make. `trains`: whether it is a step; None where nothing runs.
    - `take`: this process's part of a call: its outputs, and the timeline of a step if that was asked for. `step` is
      None for a forward without backward; `kind` is the number of this kind of call.
    - `prepared`: a call of this kind is ready, and does not run.
    - `write`: do what one process does for all.
    - `check_alone`, `check_forward`, `check_scaler`: raise FxpipeError for what several processes cannot do.
    """

    @property
    def leads(self) -> bool: ...
    @property
    def lock(self) -> Lock: ...
    def collect(self, value: Any) -> list[Any]: ...
    def collect_all(self, value: Any) -> list[Any]: ...
    def call(self, call: Callable[[Given], Any], given: Given, trains: bool | None = None) -> Any: ...
    def take(
        self, live: Live, inputs: Sequence[Any], chunks: int, step: StepOptions | None, kind: int = 0
    ) -> tuple[tuple[Any, ...], Timeline | None]: ...
    def prepared(self, kind: int) -> None: ...
    def write(self, do: Callable[[], None]) -> None: ...
    def check_alone(self, method: str) -> None: ...
    def check_forward(self) -> None: ...
    def check_scaler(self, scaler: torch.amp.GradScaler | None) -> None: ...


class Tensors(Protocol):
    """Which of the model's tensors are in this process: `held` are all that are used here, `own` those that are saved
    by this process and no other; `only_held` leaves out others. See the methods of `DropInModule`."""

    def held(self) -> dict[str, Tensor]: ...
    def own(self) -> dict[str, Tensor]: ...
    def only_held(self, pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]: ...
    def state_dict(self, *args: Any, **kwargs: Any) -> Any: ...
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any: ...


class Alone:
    """The one process of a pipe, which has all of the model."""

    leads = True

    def __init__(self, model: nn.Module) -> None:
        self.model, self.lock = model, Lock()

    def collect(self, value: Any) -> list[Any]:
        return [value]

    collect_all = collect

    def call(self, call: Callable[[Given], Any], given: Given, trains: bool | None = None) -> Any:
        with self.lock:
            return call(given)

    def take(
        self, live: Live, inputs: Sequence[Any], chunks: int, step: StepOptions | None, kind: int = 0
    ) -> tuple[tuple[Any, ...], Timeline | None]:
        if step is None:
            return live.scheduler.run(inputs, chunks), None
        return take_step(live.step_scheduler, inputs, chunks, step.scaler, step.accumulate, step.timeline)

    def write(self, do: Callable[[], None]) -> None:
        do()

    def anything(self, *_: Any) -> None:
        """One process can do all of it, and has nobody to tell."""

    prepared = check_alone = check_forward = check_scaler = anything

    def held(self) -> dict[str, Tensor]:
        return tensors_of(self.model)

    own = held

    def only_held(self, pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        return pairs

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)
