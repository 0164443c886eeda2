"""A module that stands in for the user's model: same parameters, same keys, same hooks, same attributes.

Wrapping a model the usual way (`self.model = model`) puts "model." in front of every key of `state_dict()`. The shell
instead shares the model's own dicts of parameters, buffers and children, so whatever a user does with a module
(optimizers before or after, `named_parameters`, `zero_grad`, freezing, hooks on submodules, `load_state_dict`) acts on
the model itself. Reads and writes of tensors wait while another thread captures: then the dicts hold hollow ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from .codegen.load import tensors_of
from .errors import FxpipeError

SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Forward:
    """A method `forward` that shows the signature of the model's: there the transformers' Trainer, for one, looks which
    columns of a batch the model takes."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method

    def __get__(self, shell: Any, kind: type | None = None) -> Callable[..., Any]:
        if shell is None:
            return self.method
        bound: Any = partial(self.method, shell)
        bound.__wrapped__ = shell.model.forward  # where inspect.signature goes on
        return bound  # type: ignore[no-any-return]


class Shell(nn.Module):
    """`model` seen through another `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["model"] = model  # past __setattr__, which would register it as a child
        for name in SHARED:
            self.__dict__[name] = model.__dict__[name]
        self.__dict__["_lock"] = threading.RLock()
        self.training = model.training

    def __getattr__(self, name: str) -> Any:
        """What is not the shell's own is the model's: `pipe.config`, `pipe.encoder`."""
        if name == "model":  # not there yet: in a copy or a pickle under way
            raise AttributeError(name)
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is set, is set on the model: `pipe.temperature = 0.5`, `pipe.head = nn.Linear(8, 4)`."""
        if "model" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def forward_only(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for the whole batch, without gradients: for evaluation."""
        with torch.no_grad():
            return self(*args, **kwargs)

    @property
    def leads(self) -> bool:
        """Whether this process is the one to print, log and show a bar: there is one in each world."""
        return True

    def collect(self, value: Any) -> list[Any]:
        """What the processes of the pipe pass here, all of them together, in their order."""
        return [value]

    def collect_all(self, value: Any) -> list[Any]:
        """`collect` of all processes that train the model: those of this pipe, and of pipes beside it."""
        return self.collect(value)

    def own_tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that this process trains and saves, by path; each is so in one process alone."""
        return tensors_of(self.model)

    def train(self, mode: bool = True) -> Self:
        """Switch the model, and all in it, to training or evaluation."""
        self.model.train(mode)
        self.training = mode
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The model's own, with its own keys."""
        with self._lock:
            return iter(list(super().named_parameters(*args, **kwargs)))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The model's own, with its own keys."""
        with self._lock:
            return iter(list(super().named_buffers(*args, **kwargs)))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, with its own keys and hooks."""
        with self._lock:
            return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Into the model itself."""
        with self._lock:
            return self.model.load_state_dict(state_dict, strict=strict, assign=assign)


def check_grad() -> None:
    """Raise FxpipeError where no step can be."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise FxpipeError("step() computes gradients, which are switched off here; call the pipe to run forward")
