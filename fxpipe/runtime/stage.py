"""The base of generated stages: the model's own tensors, found under the model's own names.

    stage = Stage1({"layers.0.weight": weight}, {}, torch.device("cpu"))
    stage.layers[0].weight is weight

It holds the model's own Parameter objects, not copies, so optimizers, hooks and `.grad` work as usual.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.runtime.autograd.backward_notes import watch
from fxpipe.runtime.autograd.generated_gradients import with_vjp
from fxpipe.torch_internals.tensor_memory import version_of

from .deferred_norms import run_deferring

Slot = tuple[dict[Any, Any], Any]  # where the code of a stage finds a tensor: a dict, and the key there


class Scope(nn.Module):
    """A part of a path. The model's names are attributes, `self.layers`. Names that Python cannot spell, and names of
    the scope's own attributes (`own_names`), are indexed: `self[0]`, `self["a-b"]`, `self["device"]`.

    The dicts of nn.Module hold them too, for `parameters()` and `state_dict()`; its `__getattr__` takes as long to find
    them there as a small op takes. During a run, the attribute or item may be another tensor than the one in these
    dicts. An assignment always sets an attribute of the scope.
    """

    def __init__(self) -> None:
        super().__init__()
        self._items: dict[int | str, Any] = {}  # what is indexed; numbers as numbers

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __getitem__(self, key: int | str) -> Any:
        found = self._items.get(key)
        return self._find(str(key)) if found is None else found

    def _find(self, name: str) -> Any:
        held, key = self._place(name)
        if key in held:
            return held[key]
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    def _place(self, name: str) -> Slot:
        """Where the code finds what the model calls `name`: among the attributes, or among the items."""
        if name.isdecimal() and str(int(name)) == name:
            return self._items, int(name)
        return (vars(self) if name.isidentifier() and name not in own_names() else self._items), name

    def _hold(self, name: str, value: Tensor | Scope) -> None:
        """Hold or replace a value under any name, also one that nn.Module uses itself."""
        for others in (self._parameters, self._buffers):
            others.pop(name, None)
        if isinstance(value, nn.Parameter):
            self._parameters[name] = value
        elif isinstance(value, Tensor):
            self._buffers[name] = value
        else:
            self._modules[name] = value
        held, key = self._place(name)
        held[key] = value

    def tensor(self, path: str) -> Tensor:
        """The tensor at a path of the model."""
        scope, name = self._scope(path)
        found: Tensor = scope._find(name)
        return found

    def _scope(self, path: str) -> tuple[Scope, str]:
        """The scope that holds the last part of a path, and that part. Missing scopes are made."""
        scope: Scope = self
        *parts, name = path.split(".")
        for part in parts:
            if part not in scope._modules:
                scope._hold(part, Scope())
            scope = scope[part]
        return scope, name


class Whole(Scope):
    """A submodule that is called whole, as the model's own code: `self.router(x)`; or a method of one.

    - `run`: calls it with given tensors, in the order of their paths `run.names`, and arguments.
    - `holder`: for a method or a whole model, the scope that holds its tensors; else None, and this one does.
    """

    run: Any
    holder: Scope | None

    def __init__(self, run: Any, holder: Scope | None = None) -> None:
        super().__init__()
        for name, value in {"run": run, "holder": holder}.items():
            object.__setattr__(self, name, value)  # past nn.Module's, which would register the stage as a child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.with_tensors({})(*args, **kwargs)

    def with_tensors(self, others: Mapping[str, Tensor]) -> Callable[..., Any]:
        """The submodule as a function, with `others` in place of the tensors that it shares with other parts of the
        model, by path."""
        return _watched(self.run, self._tensors(others))

    def deferring(self, call: int, others: Mapping[str, Tensor] | None = None) -> Callable[..., Any]:
        """As `with_tensors`, with the running statistics of its norms updated at the end of the mini-batch. `call`: how
        many earlier calls in a forward update them."""
        run = self.run
        return _watched(
            lambda tensors, args, kwargs: run_deferring(run, tensors, call, args, kwargs), self._tensors(others or {})
        )

    def vjp(self, of: Collection[int], others: Mapping[str, Tensor] | None = None) -> Callable[..., Any]:
        """As `with_tensors`; after its results it returns a `Vjp`, for the gradients `of` these tensors, by place among
        its own tensors and all that it is given."""
        tensors = self._tensors(others or {})
        return lambda *args, **kwargs: with_vjp(partial(_noted, self.run), of, tensors, args, kwargs)

    def _tensors(self, others: Mapping[str, Tensor]) -> list[Tensor]:
        run, held = self.run, self if self.holder is None else self.holder
        return [others[name] if name in others else held.tensor(name) for name in run.names]


def _watched(run: Callable[..., Any], tensors: list[Tensor]) -> Callable[..., Any]:
    """The function that a stage calls for a submodule; exceptions in its backward get notes."""
    return lambda *args, **kwargs: _noted(run, tensors, args, kwargs)


def _noted(run: Callable[..., Any], tensors: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    results = run(tensors, args, kwargs)
    watch(results, (tensors, args, kwargs))
    return results


class Stage(Scope):
    """The base of generated stages.

    - `states`: the paths of its parameters and buffers; `constants`: the names of its other tensors and objects.
    - `mutates`: the paths of the buffers that forward writes; `rereads`: those whose old contents it reads.
    - `opaque`: the paths of the submodules and methods that are called whole, "" for the model.
    - `uses`: for each path of a method in `opaque`, the paths in its module of what it uses; `lists`: for each path of
      what returns lists whose lengths only a run tells, the places of these and of those that give one tensor.
    - `parts`: for each path that stands for a part of a tensor: that path, the tensor's path, and the part's ranges.
    - `unsure`: only a run with gradients shows which results need a gradient.
    - `derives`: forward takes derivatives, by autograd, for which it must run with gradients.
    - `compiled`: it runs through torch.compile; autograd's backward of it is one piece and cannot be split into halves.
    - `graded`: the tensors of which its own backward returns gradients: paths, names of constants, or places among the
      arguments of forward; None if it has no backward, and autograd runs.
    - `orders`: for each argument of forward the dimensions from the largest stride to the smallest, as its own backward
      needs it, () for a contiguous one; empty: all are contiguous.
    - `arrives`: for each result that can have a gradient, whether one comes back; empty: for all.
    - `reaches`: for each gradient that backward returns, the places of the results that it depends on among those that
      can have a gradient; empty: each depends on all.
    - `copies`: the originals of constants on other devices, by name, with the version that was copied.
    - `elsewhere`: the originals of states on other devices or held in part, by path; each run makes a new copy or view.
    """

    states: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    rereads: tuple[str, ...] = ()
    opaque: tuple[str, ...] = ()
    uses: tuple[tuple[str, tuple[str, ...]], ...] = ()
    lists: tuple[tuple[str, tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]], ...] = ()
    parts: tuple[tuple[str, str, tuple[tuple[int, int], ...]], ...] = ()
    unsure: bool = False
    derives: bool = False
    compiled: bool = False
    graded: tuple[str | int, ...] | None = None
    orders: tuple[tuple[int, ...], ...] = ()
    arrives: tuple[bool, ...] = ()
    reaches: tuple[tuple[int, ...], ...] = ()

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
            call = (calls or {})[path]
            scope._hold(name, Whole(call, scope if call.called != call.path or not path else None))
        self.copies: dict[str, tuple[Tensor, int]] = {}
        self.elsewhere: dict[str, Tensor] = {}
        self._found: dict[str, Slot] = {}
        self._slots: list[Slot] | None = None
        self._graded: list[Slot | int] | None = None
        self.regions = {held: tuple([slice(*ends) for ends in region]) for held, _, region in self.parts}
        sources = sources_of(type(self))
        for path in self.states:
            self._put_state(path, tensors[sources.get(path, path)])
        for name in self.constants:
            self._put_constant(name, constants[name])
        self._differentiable = self._find_differentiable()

    def forward(self, *args: Any) -> Any:
        raise NotImplementedError("generated stages say what they compute")

    def without_graph(self, *args: Any) -> Any:
        """The results of forward, without a graph."""
        if not self.derives:
            with torch.no_grad():
                return self.forward(*args)
        with torch.enable_grad():  # on leaves, of which forward may ask that they need a gradient
            found = self.forward(
                *[x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in args]
            )
        several = [x.detach() if isinstance(x, Tensor) else x for x in (found if isinstance(found, tuple) else [found])]
        return tuple(several) if isinstance(found, tuple) else several[0]

    def backward(
        self, kept: list[Any], sums: list[Tensor | None], *grads: Tensor | None
    ) -> tuple[list[Any], list[Any]]:
        """The gradients of the arguments, and of the tensors in `graded`. `sums`: for each of these tensors the sum of
        its gradients until now. Where it is given, backward may add to it in place and return it."""
        raise NotImplementedError("generated stages say how, where code computes gradients")

    def input_gradient(self, kept: list[Any], *grads: Tensor | None) -> tuple[list[Any], list[Any]]:
        """The gradients of the arguments, and what `weight_gradient` needs."""
        raise NotImplementedError("generated stages say how, where code computes gradients")

    def weight_gradient(self, kept: list[Any], sums: list[Tensor | None]) -> list[Any]:
        """The gradients of the tensors in `graded`, as `backward` returns them."""
        raise NotImplementedError("generated stages say how, where code computes gradients")

    @property
    def whole_model(self) -> Any:
        """The model, if it is called whole."""
        return self._find("")

    @property
    def source(self) -> str:
        """The text of the generated file."""
        return Path(inspect.getfile(type(self))).read_text(encoding="utf-8")

    def put(self, path: str, tensor: Tensor) -> None:
        """Hold another tensor at a path of the model."""
        scope, name = self._scope(path)
        scope._hold(name, tensor)
        self._found.pop(path, None)
        self._slots = self._graded = None

    def refresh(self) -> None:
        """Copy again the constants on other devices that have changed, and all parameters and buffers in
        `elsewhere`."""
        changed = {name: value for name, (value, version) in self.copies.items() if version_of(value) != version}
        for name, value in changed.items():
            self._put_constant(name, value)
        for path, tensor in list(self.elsewhere.items()):  # always: changes like `p.data.add_(1)` leave no trace
            self._put_state(path, tensor)
        if changed or self.elsewhere:
            self.find_differentiable()

    def replace(self, path: str, tensor: Tensor) -> None:
        """Hold another tensor of the model from now on."""
        self._put_state(path, tensor)
        self.find_differentiable()

    def give_back(self) -> None:
        """Write the copied buffers that forward has written back to their originals."""
        with torch.no_grad():
            for path in self.mutates:
                if path in self.elsewhere:
                    self.elsewhere[path].copy_(self.tensor(path))

    def _put_state(self, path: str, tensor: Tensor) -> None:
        """Hold a tensor of the model; or, if only a part belongs here or it is on another device, a view or copy, which
        passes gradients back."""
        self.elsewhere.pop(path, None)
        if tensor.device != self.device or path in self.regions:
            self.elsewhere[path] = tensor
            tensor = copied(tensor, self.device, self.regions.get(path))
        self.put(path, tensor)

    def _put_constant(self, name: str, value: Any) -> None:
        """Hold a constant. If it is on another device, it stays there for the model and other stages, and this stage
        holds a copy, which passes gradients back."""
        if isinstance(value, Tensor) and value.device != self.device:
            self.copies[name] = value, version_of(value)
            value = copied(value, self.device)
        object.__setattr__(self, name, value)

    def tensor(self, path: str) -> Tensor:
        held, name = self.slot(path)
        found: Tensor = held[name]
        return found

    def slot(self, path: str) -> Slot:
        """The dict and the key that hold the tensor at a path of the model."""
        found = self._found.get(path)
        if found is None:
            scope, name = self._scope(path)
            found = self._found[path] = scope._place(name)
        return found

    @property
    def slots(self) -> Sequence[Slot]:
        """The dict and the key of each tensor that may need a gradient."""
        if self._slots is None:
            found: list[Slot] = [self.slot(path) for path in self.states]
            found += [(vars(self), name) for name in self.constants if isinstance(vars(self)[name], Tensor)]
            self._slots = [slot for slot in found if differentiable(slot[0][slot[1]])]
        return self._slots

    @property
    def graded_slots(self) -> Sequence[Slot | int]:
        """The dict and the key of each tensor in `graded`, or its place among the arguments of forward."""
        if self._graded is None:
            own = {name: (vars(self), name) for name in self.constants}
            self._graded = [at if isinstance(at, int) else own.get(at) or self.slot(at) for at in self.graded or ()]
        return self._graded

    def find_differentiable(self) -> None:
        """Look anew which tensors may need a gradient."""
        self._differentiable, self._slots = self._find_differentiable(), None

    def _find_differentiable(self) -> tuple[Tensor, ...]:
        held = [self.tensor(path) for path in self.states]
        held += [value for name in self.constants if isinstance(value := getattr(self, name), Tensor)]
        return tuple(filter(differentiable, held))

    def trainable(self) -> tuple[Tensor, ...]:
        """The tensors that need a gradient now: freezing and unfreezing take effect at the next call."""
        return tuple([x for x in self._differentiable if x.requires_grad])


def sources_of(kind: type[Stage]) -> dict[str, str]:
    """The path of the tensor that each part in `kind.parts` is of, by the path that stands for the part."""
    return {held: path for held, path, _ in kind.parts}


def differentiable(x: Tensor) -> bool:
    """Whether a tensor of its type may need a gradient."""
    return x.is_floating_point() or x.is_complex()


@cache
def own_names() -> frozenset[str]:
    """The names of all attributes that stages and their parts have themselves."""
    return frozenset((*dir(Stage({}, {}, torch.device("cpu"))), *dir(Whole(None))))


def copied(tensor: Tensor, device: torch.device, region: tuple[slice, ...] | None = None) -> Tensor:
    """A tensor, or a region of it, on a device: a view if it is there already, else a copy. Gradients go back through
    it."""
    with torch.inference_mode(False), torch.enable_grad():
        return (tensor if region is None else tensor[region]).to(device)
