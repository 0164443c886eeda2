"""A saved package that runs, without capture or planning: what is in the files is what happens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .capture import NO_TARGET
from .capture.loss import modules_in
from .codegen.load import bind, load_package, tensors_of, unload
from .compiled_stages import Backend, compile_stages
from .engines.local import Pipeline
from .engines.stepper import Stepper
from .engines.timed import take_step
from .errors import InputError
from .given import Given
from .runtime import Stage
from .shell import Forward, Shell, check_grad


class Loaded(Shell):
    """What `fxpipe.load` returns; see there."""

    def __init__(self, folder: Path, model: nn.Module, backend: Backend | None = None) -> None:
        super().__init__(model)
        package = load_package(folder)
        forget = weakref.finalize(self, unload, package)
        root = loss_root(package, model)
        self.__dict__.update(package=package, scheduler=None, timeline=None, _root=root, _others={}, _forget=forget)
        try:
            if backend is not None:
                compile_stages(package, backend)
            if root is None:
                self._bind({})
        except BaseException:
            forget()
            raise
        self.train(package.TRAINING)

    @Forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the whole batch. Raises InputError for another kind of call than it was saved for."""
        with self._lock:
            inputs = self._call_inputs(args, kwargs)
            return self.package.result(*self.scheduler.run(inputs, self.package.CHUNKS))

    def step(
        self,
        *args: Any,
        target: Any = NO_TARGET,
        loss_fn: Callable[..., Any] | None = None,
        outputs: bool = False,
        scaler: torch.amp.GradScaler | None = None,
        timeline: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of a whole batch, as `pipe.step(...)` does it, for the kind of step that it was saved
        for. The loss is in the files: of `loss_fn` only the tensors are used, if it has any, and else it may be left
        out."""
        found = self._step((args, kwargs, target), loss_fn, outputs, scaler, timeline)
        loss, output = self.package.result(*found)
        return (loss, output) if outputs else loss

    def _step(
        self, given: Given, loss_fn: Any, outputs: bool, scaler: torch.amp.GradScaler | None, timeline: bool
    ) -> tuple[Any, ...]:
        """The outputs of a step, flat."""
        with self._lock:
            inputs = self._step_inputs(*given, outputs)
            self._bind_loss(loss_fn)
            found, self.__dict__["timeline"] = take_step(self.scheduler, inputs, self.package.CHUNKS, scaler, timeline)
        return found

    def _call_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The flat inputs of a call. Raises InputError for one that the package is not for."""
        if self._outputs is not None:
            raise InputError("this package was saved after a step: call .step(...), or save one after calling the pipe")
        if torch.is_grad_enabled() and isinstance(self.scheduler, Stepper):
            raise InputError(
                "this package was saved from a pipe over ranks, whose calls compute no gradients: call "
                ".forward_only(...), or save one after pipe.step(...)"
            )
        return self._inputs(args, kwargs)

    def _step_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any, outputs: bool) -> Any:
        """Those of a step."""
        if self._outputs is None:
            raise InputError("this package was saved after a call: call it, or save one after pipe.step(...)")
        if outputs and not self._outputs:
            raise InputError("this package was saved after a step that returned the loss alone, without outputs=True")
        check_grad()
        return self._inputs(args, self._named(kwargs, target))

    def _named(self, kwargs: Mapping[str, Any], target: Any) -> Mapping[str, Any]:
        """The target among the keyword arguments of the package's own call."""
        name = "loss_target" if "loss_target" in signature(self.package.inputs).parameters else "target"
        return kwargs if target is NO_TARGET else {**kwargs, name: target}

    def _inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.training != self.package.TRAINING:
            kind = "training" if self.package.TRAINING else "evaluation"
            raise InputError(f"this package was saved for {kind}; save another one after pipe.train() or pipe.eval()")
        try:
            return self.package.inputs(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise InputError(f"this package was saved for another kind of call: {error}") from None

    @property
    def _outputs(self) -> bool | None:
        """Whether a step returns the model's outputs; None if the package is not one of steps."""
        found: bool | None = getattr(self.package, "OUTPUTS", None)
        return found

    def _bind(self, others: Mapping[str, Tensor]) -> None:
        made = bind(self.package, self.model, others=others)
        if self.scheduler is not None:
            self.scheduler.close()
        self.__dict__.update(scheduler=made, _others=others)

    def _bind_loss(self, loss_fn: Callable[..., Any] | None) -> None:
        """Give the stages the tensors that the loss function has now."""
        if self._root is None or (loss_fn is None and self.scheduler is not None):
            return
        others: dict[str, Tensor] = {}
        for path, module in modules_in(loss_fn, self._root).items():
            others |= {f"{path}.{name}": tensor for name, tensor in tensors_of(module).items()}
        if self.scheduler is None or any(others.get(key) is not x for key, x in self._others.items()):
            self._bind(others)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, as modules; `.source` is the text of the file each came from."""
        scheduler: Pipeline = self.scheduler
        return scheduler.stages

    def close(self) -> None:
        """End the worker threads. A pipe that is garbage collected closes itself."""
        if self.scheduler is not None:
            self.scheduler.close()
        self._forget()


def loss_root(package: ModuleType, model: nn.Module) -> str | None:
    """What the keys of the loss function's own tensors begin with; None if the package has none."""
    if not hasattr(package, "OUTPUTS"):
        return None
    others = (key for key, *_ in package.TENSORS if key.startswith("loss_fn") and key not in tensors_of(model))
    return next((key.partition(".")[0] for key in others), None)
