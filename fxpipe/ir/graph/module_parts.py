"""What a submodule or a method that is kept whole runs with: the module, or a part of it, with the tensors of the op.

    features = self.get_image_features(x)      a method, which uses self.visual and self.newline

    part.visual      the submodule itself          part.layers     `Unused`: nothing can be done with it
    part.newline     the tensor of the op          part.config     what else the module has

So no tensor takes part that the op is not given, and other threads may use the rest of the module meanwhile. The same
holds for a function that forward calls, self.loss_function(x): it is found by the name that forward calls it by.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, Never
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fxpipe.ir.sample_lists import rebuilt

SET_NO_PARAMETER = "compute with the other tensor itself, as in torch.nn.functional.linear(x, weight)"
Named = Sequence[tuple[str, nn.Module]]  # modules, with their paths
LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()  # a module has one set of tensors at a time
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LOCKS.clear)  # the thread of the parent that holds a lock is not in the child


class OfModule(NamedTuple):
    """In arguments, in place of an object that the module has: the module itself, a submodule or another attribute."""

    path: str

    def of(self, module: nn.Module) -> Any:
        found: Any = module
        for name in self.path.split(".") if self.path else ():
            found = getattr(found, name)
        return found


class Unused:
    """What a part has in place of a tensor or submodule that the method does not use."""

    def __init__(self, path: str) -> None:
        vars(self)["path"] = path

    def __getattr__(self, name: str) -> Never:
        raise AttributeError(name) if name.startswith("__") else self._error()

    def __call__(self, *args: Any, **kwargs: Any) -> Never:
        raise self._error()

    __setattr__ = __bool__ = __len__ = __iter__ = __getitem__ = __eq__ = __call__
    __hash__ = None  # type: ignore[assignment]

    def _error(self) -> RuntimeError:
        return RuntimeError(
            f"a method that is kept whole uses {vars(self)['path']}, which it did not use when it was captured; use it "
            "whatever the values of tensors are, or in forward"
        )


def is_used(path: str, uses: Collection[str] | None) -> bool:
    """Whether a tensor or submodule is used, or is in one that is; all are if `uses` is None.

    >>> is_used("visual.fc.weight", {"visual"}), is_used("visuals.weight", {"visual"})
    (True, False)
    """
    return uses is None or any(f"{path}.".startswith(f"{use}.") for use in uses)


def slots(module: nn.Module, uses: Collection[str] | None = None) -> list[tuple[str, nn.Module, str]]:
    """For each parameter and buffer that is used its path, the module that holds it, and its key there."""
    return _slots(module.named_modules(), uses)


def _slots(named: Iterable[tuple[str, nn.Module]], uses: Collection[str] | None) -> list[tuple[str, nn.Module, str]]:
    return [
        (at, part, key)
        for path, part in named
        for held in (part._parameters, part._buffers)
        for key, tensor in held.items()
        if isinstance(tensor, Tensor) and is_used(at := f"{path}.{key}" if path else key, uses)
    ]


def used_modules(module: nn.Module, uses: Collection[str] | None) -> list[tuple[str, nn.Module]]:
    """The submodules that are used, with their paths."""
    return [(path, part) for path, part in module.named_modules() if is_used(path, uses)]


@contextmanager
def running_in(
    module: nn.Module, method: str, uses: Collection[str] | None
) -> Iterator[tuple[Named, Callable[..., Any]]]:
    """A context with the modules in which a method runs, and the method. `uses`: the paths of the tensors and
    submodules that it uses; None for all of the module itself. Raises RuntimeError for attributes that it sets."""
    if uses is None:
        yield [*module.named_modules()], function_named(module, method)
        return
    made: dict[int, nn.Module] = {}
    part = _part_maker(module, uses, made)(module, "")
    if hasattr(type(part), method):  # a twin has something else in its place
        vars(part).pop(method, None)
    before = [(one, dict(vars(one))) for one in made.values()]
    paths = [(path, one) for path, one in module.named_modules() if id(one) in made or is_used(path, uses)]
    own = function_named(part, method)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = rebuilt((args, kwargs), lambda given: given.of(part) if isinstance(given, OfModule) else None)
        return own(*args, **kwargs)

    yield [(path, made.get(id(one), one)) for path, one in paths], run
    for one, held in before:
        now = vars(one)
        for name in now.keys() | held.keys():
            if name not in now or name not in held or now[name] is not held[name]:
                raise RuntimeError(
                    f"{type(module).__name__}.{method} is kept whole, and sets {name}, which it did not when it was "
                    "captured; return the value, and set it in forward"
                )


def function_named(module: nn.Module, name: str) -> Callable[..., Any]:
    """The method of a module, or the function that its methods call by this name, without what a partial of it adds: an
    attribute, a variable that they see, or one in a module or class that they name. Raises AttributeError for none."""
    found = getattr(module, name, None)
    kinds = (kind for kind in type(module).__mro__ if issubclass(kind, nn.Module) and kind is not nn.Module)
    methods = (inspect.unwrap(one) for kind in kinds for one in vars(kind).values() if isinstance(one, FunctionType))
    known = [(one, known_in(one)) for one in methods if isinstance(one, FunctionType)] if found is None else []
    holders = (seen.get(other) for method, seen in known for other in method.__code__.co_names)
    found_in = [seen[name] for _, seen in known if name in seen]
    found_in += [vars(held)[name] for held in holders if isinstance(held, (ModuleType, type)) and name in vars(held)]
    found = next((one for one in found_in if callable(one)), found)
    if found is None:
        raise AttributeError(f"{type(module).__name__} calls nothing by the name {name}")
    if isinstance(found, staticmethod):
        found = found.__func__
    while isinstance(found, partial):
        found = found.func
    return found


def known_in(function: FunctionType) -> Mapping[str, Any]:
    """The variables that a function sees and does not set: of its module and its closure."""
    return ChainMap(closure_of(function), function.__globals__)


def closure_of(function: FunctionType) -> dict[str, Any]:
    """The variables of a function's closure that have a value."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is not set yet
            found[name] = cell.cell_contents
    return found


def _part_maker(
    module: nn.Module, uses: Collection[str], made: dict[int, nn.Module]
) -> Callable[[nn.Module, str], Any]:
    """A function that makes the part of a submodule at a path; those that it makes are added to `made`, by the ids of
    the submodules."""
    named = dict(module.named_modules())
    ways = {use.rpartition(".")[0] for use in uses}
    ways |= {way[:at] for way in ways for at, sign in enumerate(way) if sign == "."} | {""}
    whole = {id(part) for path, part in named.items() if path and is_used(path, uses)}
    opened = {id(part) for path, part in named.items() if path in ways}

    def part_of(one: nn.Module, path: str) -> Any:
        if id(one) in whole or not slots(one):
            return one
        if id(one) not in opened:
            return Unused(path)
        if id(one) not in made and isinstance(one, torch.jit.ScriptModule):  # its code looks into no other object
            made[id(one)] = one
            for name, value in one.named_children():
                part_of(value, f"{path}.{name}".lstrip("."))
        if id(one) not in made:
            made[id(one)] = part = object.__new__(type(one))
            vars(part).update(vars(one))
            for kind in ("_parameters", "_buffers", "_modules"):
                held = {name: (value, f"{path}.{name}".lstrip(".")) for name, value in getattr(one, kind).items()}
                vars(part)[kind] = {
                    name: part_of(value, at)
                    if isinstance(value, nn.Module)
                    else value
                    if value is None or is_used(at, uses)
                    else Unused(at)
                    for name, (value, at) in held.items()
                }
        return made[id(one)]

    return part_of


@contextmanager
def holding(named: Named, tensors: Sequence[Tensor], uses: Collection[str] | None = None) -> Iterator[None]:
    """A context in which these modules have other tensors in place of their own, of those that are used, in the order
    of `slots`. If a buffer is set to a new tensor, the contents are copied into the given one."""
    with ExitStack() as locks:
        for _, part in sorted(named, key=lambda pair: id(pair[1])):
            # a part may be called by itself too; all take them in one order
            locks.enter_context(LOCKS.setdefault(part, threading.RLock()))
        there = _slots(named, uses)
        known = {(id(part), key) for _, part, key in there}
        are_buffers = [key in part._buffers for _, part, key in there]
        places: list[tuple[dict[str, Any], str]] = []
        for (_, part, key), is_buffer in zip(there, are_buffers, strict=True):
            places.append((part._buffers if is_buffer else part._parameters, key))
        own = [held[key] for held, key in places]
        try:
            for (held, key), tensor in zip(places, tensors, strict=True):
                held[key] = tensor
            yield
            for (path, _, _), is_buffer, (held, key), tensor in zip(there, are_buffers, places, tensors, strict=True):
                now = held[key] if key in held else None  # noqa: SIM401  # a script module's has no get
                if now is not tensor:
                    _copy(now, tensor, path, is_buffer)
            made = [path for path, part, key in _slots(named, uses) if (id(part), key) not in known]
            if made:
                raise RuntimeError(
                    f"forward of {type(named[0][1]).__name__} made {', '.join(map(repr, made))}, which was not there "
                    "when it was captured; make parameters and buffers in __init__, or call the model once before you "
                    "compile it"
                )
        finally:
            for (held, key), mine in zip(places, own, strict=True):
                held[key] = mine


def _copy(new: Any, buffer: Tensor, path: str, is_buffer: bool) -> None:
    if not is_buffer:  # whose gradient would go to the new one
        raise RuntimeError(f"forward sets {path} to another parameter; {SET_NO_PARAMETER}")
    if not isinstance(new, Tensor) or new.shape != buffer.shape:
        raise RuntimeError(f"forward sets {path} to something of another shape; a buffer must keep its shape")
    with torch.no_grad():
        buffer.copy_(new)
