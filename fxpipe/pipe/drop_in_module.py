"""A module that stands in for the user's model: same parameters, same keys, same hooks, same attributes.

Wrapping a model the usual way (`self.model = model`) puts "model." in front of every key of `state_dict()`. The shell
instead shares the model's own dicts of parameters, buffers and children, so whatever a user does with a module
(optimizers before or after, `named_parameters`, `zero_grad`, freezing, hooks on submodules, `load_state_dict`) acts on
the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from fxpipe.errors import FxpipeError, PlanError
from fxpipe.pipe.options.option_forms import shown

from .fork_lock import Lock
from .processes import Processes, Tensors

RUNNING = {"step", "rehearse", "prepare", "verify"}  # methods that run or capture the model
F = TypeVar("F", bound=Callable[..., Any])
SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


# A method that a torch.compile around the pipe leaves out: its graph breaks there, and goes on behind.
not_compiled: Callable[[F], F] = torch.compiler.disable(  # type: ignore[no-untyped-call]
    reason="it runs a pipeline of fxpipe, which is compiled already"
)


def running(method: F) -> F:
    """A method that runs or captures the model: not while the pipe is closed, nor in a graph of torch.compile."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.check_open()
        return method(self, *args, **kwargs)

    return not_compiled(run)  # type: ignore[return-value]


class Forward:
    """A method `forward` that shows the signature of the model's: there the transformers' Trainer, for one, looks which
    columns of a batch the model takes."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = running(method)

    def __get__(self, shell: Any, kind: type | None = None) -> Callable[..., Any]:
        if shell is None:
            return self.method
        bound: Any = partial(self.method, shell)
        bound.__wrapped__ = shell.model.forward  # where inspect.signature goes on
        return bound  # type: ignore[no-any-return]


@dataclass(kw_only=True)
class State:
    """What a pipe has beside the model. `processes`: who trains it; `tensors`: which of its tensors are here; `closed`:
    whether the pipe is."""

    processes: Processes
    tensors: Tensors
    closed: bool = False

    @property
    def lock(self) -> Lock:
        """Held by the thread that uses the pipe."""
        return self.processes.lock


class DropInModule(nn.Module):
    """`model` seen through another `forward`. What is not the model's is in one attribute, `_state`."""

    model: Any  # an nn.Module, with items and a length if it has them
    _state: State
    _call_impl = not_compiled(nn.Module._call_impl)  # by this name torch.compile reads the calls of modules

    def __init_subclass__(cls) -> None:
        for name in RUNNING & vars(cls).keys():
            setattr(cls, name, running(vars(cls)[name]))

    def __init__(self, model: nn.Module, state: State) -> None:
        super().__init__()
        for name, value in {"model": model, "_state": state, **{name: vars(model)[name] for name in SHARED}}.items():
            object.__setattr__(self, name, value)  # past nn.Module's, which would register the model as a child

    @property
    def training(self) -> bool:
        """The model's own: `model.eval()` and `pipe.eval()` are the same."""
        return bool(self.model.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "model" in vars(self):  # nn.Module sets one before there is a model
            self.model.training = mode

    def extra_repr(self) -> str:
        """What stands before the model's children where a pipe is printed."""
        return ", ".join(filter(None, (f"of {type(self.model).__name__}", self.model.extra_repr())))

    def __getattr__(self, name: str) -> Any:
        """What is not the shell's own is the model's: `pipe.config`, `pipe.encoder`."""
        if name == "model":  # not there yet: in a copy or a pickle under way
            raise AttributeError(name)
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is set, is set on the model: `pipe.temperature = 0.5`, `pipe.head = nn.Linear(8, 4)`."""
        if "model" not in vars(self) or name in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __getitem__(self, key: Any) -> Any:
        """What the model has there, as `pipe[0]` of an nn.Sequential; its own TypeError where it has no items."""
        return self.model[key]

    def __len__(self) -> int:
        return len(self.model)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.model)

    def __contains__(self, item: Any) -> bool:
        return item in self.model

    def __bool__(self) -> bool:
        return bool(self.model)  # of a module without a length, which `len` would not tell

    def check_open(self) -> None:
        """Raise FxpipeError after `close()`."""
        if self._state.closed:
            raise FxpipeError("this pipe is closed; compile the model again, or load the package again")

    @running
    def forward_only(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the whole batch, without gradients: for evaluation. Over ranks, on every rank."""
        with torch.no_grad():
            return self(*args, **kwargs)

    @property
    def leads(self) -> bool:
        """Whether this process is the one to print, log and show a bar: there is one in each world."""
        return self._state.processes.leads

    def collect(self, value: Any) -> list[Any]:
        """What the processes of the pipe pass here, all of them together, in their order. Raises RankError if one is
        lost."""
        return self._state.processes.collect(value)

    def collect_all(self, value: Any) -> list[Any]:
        """`collect` of all processes that train the model: those of this pipe, and of pipes beside it."""
        return self._state.processes.collect_all(value)

    def held_tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that this process keeps and trains, by path. Over ranks: those of its stages, on
        the leader also those that no stage uses; a stage with replicas is on each of their ranks, with the same values.
        DTensors where pipes side by side have parts."""
        return self._state.tensors.held()

    def own_tensors(self) -> dict[str, Tensor]:
        """As `held_tensors`, but each is in one process alone, that of the first replica, which saves it."""
        return self._state.tensors.own()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The model's own, with its own keys; over ranks, those of the stages on this rank."""
        return self._state.tensors.only_held(super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The model's own, with its own keys; over ranks, those of the stages on this rank."""
        return self._state.tensors.only_held(super().named_buffers(*args, **kwargs))

    def train(self, mode: bool = True) -> Self:
        """Switch the model, and all in it, to training or evaluation."""
        self.model.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, with its own keys and hooks. Over ranks, what belongs to this rank: all ranks together have
        all of it, and nothing twice: what replicas hold belongs to the first of them."""
        return self._state.tensors.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Into the model itself, once no thread runs the pipe. Over ranks: all of it, or what this rank holds; what
        belongs elsewhere is left alone. All replicas load the same, as from the `state_dict()` of the first one."""
        with self._state.lock:
            return self._state.tensors.load_state_dict(state_dict, strict=strict, assign=assign)


def check_model(model: Any, function: str) -> None:
    """Raise PlanError for what is no module, for a pipe, and for a module that has a pipe in it."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"model is {shown(model)}; fxpipe.{function} takes an nn.Module")
    if isinstance(model, DropInModule):
        raise PlanError(f"model is a pipe already; give the model in it, as in fxpipe.{function}(pipe.model, ...)")
    check_no_pipe_in(model)


def check_no_pipe_in(model: nn.Module) -> None:
    """Raise PlanError for a module that has a pipe among its submodules: one pipeline cuts all of a model."""
    for name, module in model.named_modules():
        if isinstance(module, DropInModule):
            raise PlanError(
                f"{name} of {type(model).__name__} is a pipe, and a pipe cannot be a part of another: put the model "
                f"in it there, as in model.{name} = model.{name}.model"
            )


def check_grad() -> None:
    """Raise FxpipeError where no step can be."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise FxpipeError("step() computes gradients, which are switched off here; call the pipe to run forward")
