"""A module that replaces the user's model: same parameters, same keys, same hooks, same attributes.

Wrapping a model the usual way (`self.model = model`) puts "model." in front of every key of `state_dict()`.
`DropInModule` instead shares the model's own dicts of parameters, buffers and children, so whatever a user does with it
(optimizers before or after, `named_parameters`, `zero_grad`, freezing, hooks on submodules, `load_state_dict`) acts on
the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from inspect import isfunction
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from fxpipe.errors import FxpipeError, PlanError, nearest
from fxpipe.pipe.options.option_forms import shown
from fxpipe.torch_internals.capability import check_torch
from fxpipe.torch_internals.compiling.stage_compiler import calls_through, left_alone, set_compiler

from .interpreter.fork_lock import Lock
from .libraries.library_model import class_for_libraries, device_map, method_of
from .processes import Processes, Tensors

RUNNING = {"step", "rehearse", "prepare", "verify"}  # methods that run or capture the model
NOT_TIMED = "no step was timed yet: call pipe.step(..., timeline=True) first"
F = TypeVar("F", bound=Callable[..., Any])
SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def not_compiled(method: F) -> F:
    """A method that torch.compile does not trace: the graph breaks at the call and continues after it. Like
    torch.compiler.disable, which also imports Dynamo: that takes more than a second where nothing is traced."""

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = set_compiler(None)
        try:
            return method(*args, **kwargs)
        finally:
            set_compiler(before)

    return left_alone(run, "it runs a pipeline of fxpipe, which is compiled already")  # type: ignore[no-any-return]


def running(method: F) -> F:
    """A method that runs or captures the model: it raises FxpipeError if the pipe is closed, and torch.compile does not
    trace it."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_open()
        return method(self, *args, **kwargs)

    return not_compiled(run)  # type: ignore[return-value]


class Forward:
    """A method `forward` with the signature of the model's. For example, the Trainer of transformers reads from it
    which columns of a batch the model takes."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = running(method)

    def __get__(self, shell: Any, kind: type | None = None) -> Callable[..., Any]:
        if shell is None:
            return self.method
        bound: Any = partial(self.method, shell)
        bound.__wrapped__ = shell.model.forward  # inspect.signature follows it
        return bound  # type: ignore[no-any-return]


class Inherited:
    """A method of nn.Module: the model's own where its class has another one, as `half` of a LightningModule, which
    notes the dtype."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    def __get__(self, shell: Any, kind: type | None = None) -> Callable[..., Any]:
        if shell is None:
            return self.method
        name = self.method.__name__
        if getattr(type(vars(shell).get("model")), name, self.method) is self.method:
            return self.method.__get__(shell, kind)  # type: ignore[no-any-return]
        own = shell._state.tensors.attribute(shell, name)

        @wraps(own)
        def run(*args: Any, **kwargs: Any) -> Any:
            found = own(*args, **kwargs)
            return shell if found is shell.model else found

        return run


@dataclass(kw_only=True)
class State:
    """What a pipe has besides the model.

    - `processes`: the processes that train the model.
    - `tensors`: which of the model's tensors this process has.
    - `closed`: whether `close()` was called.
    """

    processes: Processes
    tensors: Tensors
    closed: bool = False

    @property
    def lock(self) -> Lock:
        """Held by the thread that uses the pipe."""
        return self.processes.lock


class NothingToTrain(nn.Parameter):
    """An empty parameter, among the `parameters()` of a rank that has none to train: torch's optimizers refuse an empty
    list, and the script is the same on all ranks."""


@calls_through(not_compiled)
class DropInModule(nn.Module):
    """What every pipe is: a module with the parameters, keys, hooks and attributes of `model`, the same objects, but
    another `forward`. All that is not the model's is in one attribute, `_state`."""

    model: Any  # an nn.Module, with items and a length if it has them
    _state: State

    def __init_subclass__(cls) -> None:
        for name in RUNNING & vars(cls).keys():
            setattr(cls, name, running(vars(cls)[name]))

    def __init__(self, model: nn.Module, state: State) -> None:
        super().__init__()
        for name, value in {"model": model, "_state": state, **{name: getattr(model, name) for name in SHARED}}.items():
            object.__setattr__(self, name, value)  # not nn.Module's, which would register the model as a child

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What libraries that save models take for the class; `type(pipe)` is the pipe's own."""
        model = vars(self).get("model")
        return type(self) if model is None else class_for_libraries(type(self), type(model))

    def _get_name(self) -> str:
        """What it is called when it is printed."""
        return type(self).__name__

    @property
    def hf_device_map(self) -> dict[str, str]:
        """The devices of the stages. Libraries of Hugging Face neither move nor replicate a model that has this."""
        return device_map(self.options.devices)

    @property
    def training(self) -> bool:
        """The mode of the model: `model.eval()` and `pipe.eval()` do the same."""
        return bool(self.model.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "model" in vars(self):  # nn.Module sets one before there is a model
            self.model.training = mode

    def extra_repr(self) -> str:
        """The line before the model's children when a pipe is printed."""
        return ", ".join(filter(None, (f"of {type(self.model).__name__}", self.model.extra_repr())))

    def __getattr__(self, name: str) -> Any:
        """Attributes that the pipe does not have are the model's: `pipe.config`, `pipe.encoder`; but for methods that
        would run it, or save it."""
        if name in ("model", "_state"):  # not set yet, while a copy or pickle is being made
            raise AttributeError(name)
        own = method_of(self, name)
        if own is not None:
            return own
        kind: Any = type(self)
        try:
            return self._state.tensors.attribute(self, name)
        except AttributeError as error:
            if not name.startswith("_") and (near := nearest(name, own_names(kind))):
                error.add_note(f"did you mean {near!r} of the pipe?")
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        """New attributes are set on the model: `pipe.temperature = 0.5`, `pipe.head = nn.Linear(8, 4)`."""
        if "model" not in vars(self) or name in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __getitem__(self, key: Any) -> Any:
        """The model's item, as `pipe[0]` of an nn.Sequential; a model without items raises its own TypeError."""
        return self.model[key]

    def __len__(self) -> int:
        return len(self.model)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.model)

    def __contains__(self, item: Any) -> bool:
        return item in self.model

    def __bool__(self) -> bool:
        return bool(self.model)  # `__len__` would fail for a model without a length

    def check_open(self) -> None:
        """Raise FxpipeError after `close()`."""
        if self._state.closed:
            raise FxpipeError("this pipe is closed; compile the model again, or load the package again")

    @running
    def forward_only(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the pipe under `torch.no_grad()`, for evaluation; call `eval()` before. In a `RankPipe` every rank
        calls it and gets the outputs."""
        with torch.no_grad():
            return self(*args, **kwargs)

    @property
    def leads(self) -> bool:
        """Whether this process prints, logs and shows progress: of all processes that train the model, one does."""
        return self._state.processes.leads

    def collect(self, value: Any, call: str = "collect") -> list[Any]:
        """The values that all processes of the pipe pass, in the order of ranks. All must call it. `value` may be
        anything that can be pickled; `call` is the name of this call in errors. Raises RankError if a rank is lost, or
        makes another call."""
        return self._state.processes.collect(value, call)

    def collect_all(self, value: Any, call: str = "collect_all") -> list[Any]:
        """As `collect`, for all processes that train the model: those of this pipe and of the pipes side by side."""
        return self._state.processes.collect_all(value, call)

    def held_tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that this process keeps and trains, by name. In a `RankPipe`: those of its stages,
        on rank 0 also those that no stage uses. Replicas of a stage have the same ones, with the same values. After
        `parallelize` they may be DTensors."""
        return self._state.tensors.held()

    def own_tensors(self) -> dict[str, Tensor]:
        """Of `held_tensors`, those that this process saves: each tensor is saved by one process, the first replica, or,
        if replicas share out parameters (ZeRO-3), each part of it by one."""
        return self._state.tensors.own()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The model's parameters, with its keys, for optimizers; in a `RankPipe`, those of the stages on this rank."""
        return self._state.tensors.only_held(super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The model's buffers, with its keys; in a `RankPipe`, those of the stages on this rank."""
        return self._state.tensors.only_held(super().named_buffers(*args, **kwargs))

    def get_submodule(self, target: str) -> nn.Module:
        """The model's; `pipe.model` is the model, and not a child of that name."""
        return self.model.get_submodule(target) if target else self

    def set_submodule(self, target: str, module: nn.Module, strict: bool = False) -> None:
        """As of the model."""
        self.model.set_submodule(target, module, strict)

    def train(self, mode: bool = True) -> Self:
        """Switch the model and all its submodules to training or evaluation."""
        self.model.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, with its keys and hooks. In a `RankPipe`, the entries that this rank saves: all ranks
        together have each entry exactly once, or each part of one that replicas share out (ZeRO-3)."""
        return self._state.tensors.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the model itself; waits until no thread runs the pipe. In a `RankPipe`, `state_dict` may be that of
        the whole model, or have only what this rank holds; entries of other ranks are ignored. All replicas must load
        the same values."""
        with self._state.lock:
            return self._state.tensors.load_state_dict(state_dict, strict=strict, assign=assign)


@cache
def own_names(kind: type[Any]) -> tuple[str, ...]:
    """The public attributes that a pipe of this class has and an nn.Module has not."""
    return tuple(name for name in dir(kind) if not name.startswith("_") and not hasattr(nn.Module, name))


for name, method in vars(nn.Module).items():
    if isfunction(method) and not name.startswith("_") and name not in vars(DropInModule):
        setattr(DropInModule, name, Inherited(method))


def check_model(model: Any, function: str) -> None:
    """Raise PlanError if `model` is no module, is a pipe, or has a pipe among its submodules, and FxpipeError if torch
    does not have what fxpipe needs."""
    check_torch(f"fxpipe.{function}")
    if not isinstance(model, nn.Module):
        raise PlanError(f"model is {shown(model)}; fxpipe.{function} takes an nn.Module")
    if isinstance(model, DropInModule):
        raise PlanError(f"model is a pipe already; give the model in it, as in fxpipe.{function}(pipe.model, ...)")
    check_no_pipe_in(model)


def check_no_pipe_in(model: nn.Module) -> None:
    """Raise PlanError if a submodule is a pipe: one pipeline cuts the whole model."""
    for name, module in model.named_modules():
        if isinstance(module, DropInModule):
            raise PlanError(
                f"{name} of {type(model).__name__} is a pipe, and a pipe cannot be a part of another: put the model "
                f"in it there, as in model.{name} = model.{name}.model"
            )


def check_grad() -> None:
    """Raise FxpipeError if gradients are switched off, as a step needs them."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise FxpipeError("step() computes gradients, which are switched off here; call the pipe to run forward")
