"""The interface of a pipe to the processes that train its model, and to the tensors that they have. Here for one
process; over ranks see `ranks/ranks.py` and `ranks/rank_tensors.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxpipe.codegen.package.load_package import tensors_of
from fxpipe.engines.common.step_timer import take_step
from fxpipe.engines.rehearsal.action_profiler import Rehearsed, rehearse
from fxpipe.ir.timeline import Timeline

from .interpreter.fork_lock import Lock
from .ranks.rank_arguments import CallArguments
from .running_package import RunningPackage


class StepOptions(NamedTuple):
    """How a step is run; see `Pipe.step`."""

    scaler: torch.amp.GradScaler | None
    accumulate: int
    timeline: bool


class Processes:
    """The processes that train a model, seen from this one: here it is the only one; `Ranks` are several.

    - `leads`, `collect`, `collect_all`: see the methods of `DropInModule`.
    - `lock`: held by the thread that uses the pipe.
    - `call`: make a call together with all processes; returns its result. `name`: "step", "forward" or "rehearse", or
      "prepare" if nothing runs.
    - `take`: run this process's part of a call; returns its outputs, and the timeline of a step if it was requested.
      `step` is None for a forward without backward; `kind` is the number of this kind of call.
    - `rehearse`: the same for a rehearsal.
    - `prepared`: tell that a call of this kind is compiled but does not run.
    - `write`: run a function in one process on behalf of all.
    - `check_alone`, `check_forward`, `check_scaler`: raise FxpipeError for what several processes cannot do.
    """

    def __init__(self) -> None:
        self.lock = Lock()

    @property
    def leads(self) -> bool:
        return True

    def collect(self, value: Any, call: str = "collect") -> list[Any]:
        return [value]

    def collect_all(self, value: Any, call: str = "collect_all") -> list[Any]:
        return self.collect(value, call)

    def call(self, call: Callable[[CallArguments], Any], given: CallArguments, name: str = "prepare") -> Any:
        with self.lock:
            return call(given)

    def take(
        self, live: RunningPackage, inputs: Sequence[Any], chunks: int, step: StepOptions | None, kind: int = 0
    ) -> tuple[tuple[Any, ...], Timeline | None]:
        if step is None:
            return live.scheduler.run(inputs, chunks), None
        return take_step(live.step_scheduler, inputs, chunks, step.scaler, step.accumulate, step.timeline)

    def rehearse(
        self, live: RunningPackage, inputs: Sequence[Any], chunks: int, rounds: int, kind: int = 0
    ) -> Rehearsed:
        return rehearse(live.step_scheduler, inputs, chunks, rounds)

    def prepared(self, kind: int) -> None: ...

    def write(self, do: Callable[[], None]) -> None:
        do()

    def check_alone(self, method: str) -> None: ...
    def check_forward(self) -> None: ...
    def check_scaler(self, scaler: torch.amp.GradScaler | None) -> None: ...


class Tensors:
    """The model's tensors in this process: here all of them; see the methods of `DropInModule`.

    - `held`: the tensors that this process uses, by path; `only_held` filters (key, tensor) pairs to these.
    - `own`: the tensors that this process, and no other, saves.
    - `attribute`: an attribute of the model, as a pipe shows it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def held(self) -> dict[str, Tensor]:
        return tensors_of(self.model)

    def own(self) -> dict[str, Tensor]:
        return self.held()

    def attribute(self, pipe: Any, name: str) -> Any:
        return getattr(self.model, name)

    def only_held(self, pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        return pairs

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool, assign: bool) -> Any:
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)
