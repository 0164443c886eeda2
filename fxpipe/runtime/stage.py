"""The base of generated stages: the model's own tensors, found under the model's own names.

    stage = Stage1({"layers.0.weight": weight}, {}, torch.device("cpu"))
    stage.layers[0].weight is weight

It holds the very Parameter objects of the model, so optimizers made before or after, hooks and `.grad` need no care.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.runtime.autograd.backward_notes import watch

from .deferred_norms import run_deferring


class Scope(nn.Module):
    """A part of a path. The model's names are attributes, `self.layers`; those that Python cannot spell, and those that
    the scope has attributes of its own for (`own_names`), are indexed: `self[0]`, `self["a-b"]`, `self["device"]`.

    The two never meet: what belongs to the model is in the dicts of nn.Module, which Python looks at only where the
    scope has no attribute, and an assignment sets an attribute of the scope, whatever the model calls so.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __getitem__(self, key: int | str) -> Any:
        return self._find(str(key))

    def _find(self, name: str) -> Any:
        for held in (self._modules, self._parameters, self._buffers):
            if name in held:
                return held[name]
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def _hold(self, name: str, value: Tensor | Scope) -> None:
        """Put a value in, or in another's place, under any name, also one that nn.Module has a use for."""
        for held in (self._parameters, self._buffers):
            held.pop(name, None)
        if isinstance(value, nn.Parameter):
            self._parameters[name] = value
        elif isinstance(value, Tensor):
            self._buffers[name] = value
        else:
            self._modules[name] = value

    def tensor(self, path: str) -> Tensor:
        """The tensor at a path of the model."""
        scope, name = self._scope(path)
        found: Tensor = scope._find(name)
        return found

    def _scope(self, path: str) -> tuple[Scope, str]:
        """The scope that holds the last part of a path, made where it is missing, and that part."""
        scope: Scope = self
        *parts, name = path.split(".")
        for part in parts:
            if part not in scope._modules:
                scope._hold(part, Scope())
            scope = scope[part]
        return scope, name


class Whole(Scope):
    """A submodule that is called whole, as the model's own code: `self.router(x)`. `run` does that, given the tensors
    that it has here, their paths being `names`, and the arguments. Of a whole model they are in the stage itself."""

    run: Any
    stage: Stage | None

    def __init__(self, run: Any, stage: Stage | None = None) -> None:
        super().__init__()
        for name, value in {"run": run, "stage": stage}.items():
            object.__setattr__(self, name, value)  # past nn.Module's, which would register the stage as a child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.with_tensors({})(*args, **kwargs)

    def with_tensors(self, others: Mapping[str, Tensor]) -> Callable[..., Any]:
        """The submodule with some tensors from elsewhere: those that it shares with other parts of the model."""
        return _watched(self.run, self._tensors(others))

    def deferring(self, call: int, others: Mapping[str, Tensor] | None = None) -> Callable[..., Any]:
        """The same, with the running statistics of its norms left to the end of the mini-batch; `call`: how often a
        forward has updated them before."""
        run = self.run
        return _watched(
            lambda tensors, args, kwargs: run_deferring(run, tensors, call, args, kwargs), self._tensors(others or {})
        )

    def _tensors(self, others: Mapping[str, Tensor]) -> list[Tensor]:
        run, held = self.run, self.stage or self
        return [others[name] if name in others else held.tensor(name) for name in run.names]


def _watched(run: Callable[..., Any], tensors: list[Tensor]) -> Callable[..., Any]:
    """What a stage calls, given what runs it: its backward has notes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        results = run(tensors, args, kwargs)
        watch(results, (tensors, args, kwargs))
        return results

    return call


class Stage(Scope):
    """`states`: paths of the model's parameters and buffers; `constants`: names of other things it uses. `mutates`:
    paths of the buffers that forward writes; `rereads`: those of them whose old contents it reads. `copies` are the
    constants that belong on another device, as they are there, with the version that was copied; `elsewhere` the
    parameters and buffers that do, or are held in part, by their paths: of those each run has a new copy or view.
    `opaque`: paths of the submodules that are called whole, "" for the model. `parts`: which of the paths stand for a
    part of a tensor, the path of that tensor, and the ranges of the part in its dimensions. `unsure`: only a run with
    gradients tells which of its results need one. `compiled`: its backward is in one piece."""

    states: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    rereads: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    parts: tuple[tuple[str, str, tuple[tuple[int, int], ...]], ...] = ()
    unsure: bool = False
    compiled: bool = False

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        constants: Mapping[str, Any],
        device: torch.device,
        calls: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.device = torch.device(device)
        for path in self.opaque:
            scope, name = self._scope(path)
            scope._hold(name, Whole((calls or {})[path], None if path else self))
        self.copies: dict[str, tuple[Tensor, int]] = {}
        self.elsewhere: dict[str, Tensor] = {}
        self.regions = {held: tuple([slice(*ends) for ends in region]) for held, _, region in self.parts}
        sources = {held: path for held, path, _ in self.parts}
        for path in self.states:
            self._put_state(path, tensors[sources.get(path, path)])
        for name in self.constants:
            self._put_constant(name, constants[name])
        self.find_differentiable()

    def forward(self, *args: Any) -> Any:
        raise NotImplementedError("generated stages say what they compute")

    @property
    def whole_model(self) -> Any:
        """The model, where it is called whole."""
        return self._find("")

    @property
    def source(self) -> str:
        """The text of the file that the stage came from."""
        return Path(inspect.getfile(type(self))).read_text(encoding="utf-8")

    def put(self, path: str, tensor: Tensor) -> None:
        """Hold another tensor at a path of the model."""
        scope, name = self._scope(path)
        scope._hold(name, tensor)

    def refresh(self) -> None:
        """Copy again the constants that were changed in place since."""
        changed = {name: value for name, (value, version) in self.copies.items() if version_of(value) != version}
        for name, value in changed.items():
            self._put_constant(name, value)
        for path, tensor in list(self.elsewhere.items()):  # whether one changed, none can tell: `p.data.add_(1)`
            self._put_state(path, tensor)
        if changed or self.elsewhere:
            self.find_differentiable()

    def replace(self, path: str, tensor: Tensor) -> None:
        """Hold another tensor of the model from now on."""
        self._put_state(path, tensor)
        self.find_differentiable()

    def give_back(self) -> None:
        """Write the buffers that forward wrote into those that they are copies of."""
        with torch.no_grad():
            for path in self.mutates:
                if path in self.elsewhere:
                    self.elsewhere[path].copy_(self.tensor(path))

    def _put_state(self, path: str, tensor: Tensor) -> None:
        """Hold a tensor of the model, or the stage's part of it, or a copy on the stage's device, through which
        gradients go back."""
        self.elsewhere.pop(path, None)
        if tensor.device != self.device or path in self.regions:
            self.elsewhere[path] = tensor
            tensor = copied(tensor, self.device, self.regions.get(path))
        self.put(path, tensor)

    def _put_constant(self, name: str, value: Any) -> None:
        """Hold a constant. One on another device stays there, where the model and other stages know it, and the stage
        has a copy; gradients go back through it."""
        if isinstance(value, Tensor) and value.device != self.device:
            self.copies[name] = value, version_of(value)
            value = copied(value, self.device)
        object.__setattr__(self, name, value)

    def slot(self, path: str) -> tuple[dict[str, Any], str]:
        """Where the tensor at a path of the model is held."""
        scope, name = self._scope(path)
        return (scope._parameters if name in scope._parameters else scope._buffers), name

    @property
    def slots(self) -> Sequence[tuple[dict[str, Any], str]]:
        """Where the tensors that may need a gradient are held: the dict and the key of each."""
        found: list[tuple[dict[str, Any], str]] = [self.slot(path) for path in self.states]
        found += [(vars(self), name) for name in self.constants if isinstance(vars(self)[name], Tensor)]
        return [(held, name) for held, name in found if held[name].is_floating_point() or held[name].is_complex()]

    def find_differentiable(self) -> None:
        held = [self.tensor(path) for path in self.states]
        held += [value for name in self.constants if isinstance(value := getattr(self, name), Tensor)]
        self._differentiable = tuple([x for x in held if x.is_floating_point() or x.is_complex()])

    def trainable(self) -> tuple[Tensor, ...]:
        """The tensors that need a gradient now: freezing and unfreezing take effect at the next call."""
        return tuple([x for x in self._differentiable if x.requires_grad])


def own_names() -> frozenset[str]:
    """The names of all attributes that stages and their parts have themselves."""
    return frozenset((*dir(Stage({}, {}, torch.device("cpu"))), *dir(Whole(None))))


def copied(tensor: Tensor, device: torch.device, region: tuple[slice, ...] | None = None) -> Tensor:
    """A copy of a tensor, or of a region of it, on a device; a view, if it is there. Gradients go back through it."""
    with torch.inference_mode(False), torch.enable_grad():
        return (tensor if region is None else tensor[region]).to(device)


def version_of(tensor: Tensor) -> int:
    """A number that changes when the tensor is written in place; tensors made in inference mode have none."""
    return 0 if tensor.is_inference() else tensor._version
