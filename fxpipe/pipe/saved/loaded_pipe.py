"""A saved package that runs exactly what its files say, without capture or planning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.capture import NO_TARGET
from fxpipe.capture.model_with_loss import modules_in
from fxpipe.capture.tracing.torch_modes import check_modes
from fxpipe.codegen.package.load_package import bind, tensors_of
from fxpipe.engines.common.step_engine import StepScheduler
from fxpipe.errors import FxpipeError, InputError
from fxpipe.ir.timeline import Timeline
from fxpipe.pipe.build.compiled.compiled_stages import Backend
from fxpipe.pipe.drop_in_module import NOT_TIMED, DropInModule, Forward, State, check_grad
from fxpipe.pipe.options.option_table import check_accumulate
from fxpipe.pipe.processes import Processes, StepOptions, Tensors
from fxpipe.pipe.ranks.rank_arguments import CallArguments
from fxpipe.pipe.running_package import RunningPackage, Scheduler
from fxpipe.runtime import Stage

from .call_check import check_call
from .loss_fingerprint import difference, rows
from .model_fingerprint import check_fits, load

BindLoaded = Callable[[nn.Module, Mapping[str, Tensor], ModuleType], Scheduler]


@dataclass(kw_only=True)
class LoadedState(State):
    """What a `Loaded` has besides the model.

    - `live`: the running package.
    - `bind`: the function that makes its scheduler.
    - `root`: the prefix of the keys of the loss function's own tensors; None if it has none.
    - `others`: these tensors, by key.
    - `timeline`: that of the last step with `timeline=True`.
    """

    live: RunningPackage
    bind: BindLoaded
    root: str | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    timeline: Timeline | None = None


class Loaded(DropInModule):
    """What `fxpipe.load` returns: a pipe without plan and capture. It has `forward`, `step`, `timeline`, `stages`,
    `scheduler`, `package`, `close` and what every pipe has (`DropInModule`)."""

    _state: LoadedState

    def __init__(self, model: nn.Module, state: LoadedState) -> None:
        super().__init__(model, state)
        try:
            if state.root is None:
                self._bind({})
        except BaseException:
            state.live.close()
            raise
        self.train(self.package.TRAINING)

    @property
    def package(self) -> ModuleType:
        """The imported package."""
        return self._state.live.package

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler that runs the stages; `.source` is the text of its file."""
        return self._state.live.scheduler

    @property
    def timeline(self) -> Timeline:
        """When each action of the last `step(..., timeline=True)` ran. Raises FxpipeError if there was none."""
        if self._state.timeline is None:
            raise FxpipeError(NOT_TIMED)
        return self._state.timeline

    @Forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the whole batch. Raises InputError for another kind of call than it was saved for."""
        processes = self._state.processes
        processes.check_forward()

        def call(given: CallArguments) -> tuple[Any, ...]:
            return self._take(self._call_inputs(given), None)

        return self.package.result(*processes.call(call, (args, kwargs, NO_TARGET)))

    def step(
        self,
        *args: Any,
        target: Any = NO_TARGET,
        loss_fn: Callable[..., Any] | None = None,
        outputs: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        accumulate: int = 1,
        timeline: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of a whole batch, as `Pipe.step`, for the kind of step that was saved. The loss is in
        the files: `loss_fn` may be left out, unless it has parameters or buffers of its own. If it is given, it must be
        the function that was saved, with the same constants."""
        processes = self._state.processes

        def call(given: CallArguments) -> tuple[Any, ...]:
            processes.check_scaler(scaler)
            inputs = self._step_inputs(given, loss_fn, outputs)
            self._bind_loss(loss_fn)
            return self._take(inputs, StepOptions(scaler, check_accumulate(accumulate), timeline))

        loss, output = self.package.result(*processes.call(call, (args, kwargs, target)))
        return (loss, output) if outputs else loss

    def _take(self, inputs: Sequence[Any], step: StepOptions | None) -> tuple[Any, ...]:
        """This process's part of a call."""
        found, timeline = self._state.processes.take(self._state.live, inputs, self.package.CHUNKS, step)
        if timeline is not None:
            self._state.timeline = timeline
        return found

    def _call_inputs(self, given: CallArguments) -> Any:
        """The flat inputs of a call. Raises InputError if the package is not for such a call, and FxpipeError under a
        mode of torch that would reach only some stages."""
        check_modes()
        if self._outputs is not None:
            raise InputError("this package was saved after a step: call .step(...), or save one after calling the pipe")
        if torch.is_grad_enabled() and isinstance(self.scheduler, StepScheduler):
            raise InputError(
                "this package was saved from a pipe of several ranks, whose calls compute no gradients: call "
                ".forward_only(...), or save one after pipe.step(...)"
            )
        return self._inputs(given[0], given[1])

    def _step_inputs(self, given: CallArguments, loss_fn: Callable[..., Any] | None, outputs: bool) -> Any:
        """The flat inputs of a step. Raises as `_call_inputs`, and InputError for another loss function."""
        check_modes()
        args, kwargs, target = given
        if self._outputs is None:
            raise InputError("this package was saved after a call: call it, or save one after pipe.step(...)")
        if outputs and not self._outputs:
            raise InputError("this package was saved after a step that returned the loss alone, without outputs=True")
        check_grad()
        if loss_fn is not None and (odd := difference(self.package.LOSS, rows(loss_fn))) is not None:
            raise InputError(f"{odd}; save another package after a step with it, or leave loss_fn out")
        return self._inputs(args, with_target(self.package, kwargs, target))

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.training != self.package.TRAINING:
            kind = "training" if self.package.TRAINING else "evaluation"
            raise InputError(f"this package was saved for {kind}; save another one after pipe.train() or pipe.eval()")
        try:
            found = self.package.inputs(*args, **kwargs)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise InputError(f"this package was saved for another kind of call: {error}") from None
        check_call(self.package, found)
        return found

    @property
    def _outputs(self) -> bool | None:
        """Whether a step returns the model's outputs; None if the package was not saved after a step."""
        found: bool | None = getattr(self.package, "OUTPUTS", None)
        return found

    def _bind(self, others: Mapping[str, Tensor]) -> None:
        self._state.live.bind(partial(self._state.bind, self.model, others))
        self._state.others = others

    def _bind_loss(self, loss_fn: Callable[..., Any] | None) -> None:
        """Bind the stages to the loss function's current tensors."""
        root, bound, before = self._state.root, self._state.live.bound, self._state.others
        if root is None or (loss_fn is None and bound):
            return
        others: dict[str, Tensor] = {}
        for path, module in modules_in(loss_fn, root).items():
            others |= {f"{path}.{name}": tensor for name, tensor in tensors_of(module).items()}
        if not bound or any(others.get(key) is not x for key, x in before.items()):
            self._bind(others)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, as modules; `.source` is the text of the file each came from."""
        self.check_open()
        return self.scheduler.stages

    def close(self) -> None:
        """End the worker threads. A pipe that is garbage collected closes itself."""
        self._state.closed = True
        self._state.live.close()


def with_target(package: ModuleType, kwargs: Mapping[str, Any], target: Any) -> Mapping[str, Any]:
    """The keyword arguments of a package's `inputs` function: the model's, and the target."""
    name = "loss_target" if "loss_target" in signature(package.inputs).parameters else "target"
    return kwargs if target is NO_TARGET else {**kwargs, name: target}


def load_here(folder: Path, model: nn.Module, backend: Backend | None = None) -> Loaded:
    """A package that runs in this process."""
    live = opened(folder, model, backend)
    root = loss_root(live.package, model)
    state = LoadedState(live=live, bind=bind_here, root=root, processes=Processes(), tensors=Tensors(model))
    return Loaded(model, state)


def opened(folder: Path, model: nn.Module, backend: Backend | None) -> RunningPackage:
    """The package in a folder. Raises PackageError if it is none, or was made from another model."""
    live = RunningPackage(folder, backend=backend)
    try:
        check_fits(load(folder), model)
    except BaseException:
        live.close()
        raise
    return live


def bind_here(model: nn.Module, others: Mapping[str, Tensor], package: ModuleType) -> Scheduler:
    """The scheduler of a package with all stages in this process."""
    made: Scheduler = bind(package, model, others=others)
    return made


def loss_root(package: ModuleType, model: nn.Module) -> str | None:
    """The prefix of the keys of the loss function's own tensors; None if the package has none."""
    if not hasattr(package, "OUTPUTS"):
        return None
    others = (key for key, *_ in package.TENSORS if key.startswith("loss_fn") and key not in tensors_of(model))
    return next((key.partition(".")[0] for key in others), None)
