"""Copies of what refers to a module, which refer to its twin instead: `copy.deepcopy`, but what refers to no module is
shared.

    self.run = self.layer.forward        a bound method           of the twin of self.layer
    self.order = [self.b, self.a]        a list                   of twins
    self.helper = Helper(self)           an object                whose attribute is the twin

Followed are attributes, items, closures, default arguments, bound methods, partials and weak references; not what a
function reads among its module's globals.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.capture.nested_values import PLAIN, TORCH

from .script_twin import ScriptTwin, empty_twin, is_script_dict

LEAVES = frozenset((*PLAIN, *TORCH, BuiltinFunctionType, ModuleType, nn.Parameter, Tensor))
DICTS, LISTS, SETS = (dict, OrderedDict, defaultdict), (list, deque), (set, frozenset)
MOST_ITEMS = 1000  # longer lists hold data, not parts of the model
MOST_PARTS = 10_000  # an attribute through which more than so many objects are reached leads out of the model
OUTSIDE = ("fxpipe", "threading", "logging", "asyncio", "concurrent", "multiprocessing")
HEAP_TYPE = 1 << 9  # in the flags of a class that is written in Python


class Copies:
    """The copies made so far.

    - `memo`: (original, copy) by the id of the original; `originals`: the original by the id of the copy.
    - `last`: earlier copies of mutable objects, which are filled again and so keep their identity.
    - `base`: copies that are never made again.
    """

    def __init__(self, base: Copies | None = None, last: Copies | None = None) -> None:
        self.base = base
        self.last = {} if last is None else last.memo
        self.memo: dict[int, tuple[Any, Any]] = {}
        self.originals: dict[int, Any] = {}
        self._leads_nowhere: dict[int, Any] = {}

    def note(self, original: Any, copy: Any) -> None:
        """From now on `copy` stands for `original`."""
        self.memo[id(original)] = original, copy
        self.originals[id(copy)] = original

    def known(self, value: Any) -> tuple[Any, Any] | None:
        """The value and its copy, if there is one."""
        found = self.memo.get(id(value))
        return self.base.known(value) if found is None and self.base is not None else found

    def original(self, copy: Any) -> Any:
        """What a copy was made of; anything else is its own original."""
        found = self.originals.get(id(copy), copy)
        return self.base.original(copy) if found is copy and self.base is not None else found

    def forget(self) -> None:
        """What was found to lead to no module may do so now."""
        self._leads_nowhere.clear()

    def of(self, value: Any) -> Any:
        """The value, or its copy if a module of which there is a twin is reached from it."""
        if type(value) in LEAVES or isinstance(value, (Tensor, type)):
            return value
        found = self.known(value)
        if found is not None:
            return found[1]
        return self._copied(value) if self._leads_somewhere(value) else value

    def _leads_somewhere(self, value: Any) -> bool:
        if id(value) in self._leads_nowhere:
            return False
        seen, queue = {id(value): value}, [value]
        for item in queue:
            for part in parts(item):
                if self.known(part) is not None:
                    return True
                if id(part) not in seen and id(part) not in self._leads_nowhere:
                    seen[id(part)] = part
                    queue.append(part)
            if len(queue) > MOST_PARTS:
                return False
        self._leads_nowhere |= seen
        return False

    def _copied(self, value: Any) -> Any:
        copy = self._immutable(value)
        if copy is not None:
            self.note(value, copy)
            return copy
        copy = self.before(value)
        self.note(value, copy)  # first, for it may lead to itself
        self.fill(value, copy)
        return copy

    def before(self, value: Any) -> Any:
        """The copy that `last` has of an object, to be filled anew; or an empty one."""
        found = self.last.get(id(value))
        return _empty(value) if found is None else found[1]

    def _immutable(self, value: Any) -> Any:
        """A copy of what is made with its contents; None for what is filled afterwards."""
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, weakref.ref):
            return weakref.ref(self.of(value()))
        if type(value) is partial:
            made: Any = partial(self.of(value.func), *map(self.of, value.args), **_values(value.keywords, self.of))
            vars(made).update(_values(vars(value), self.of))
            return made
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, tuple):
            items = map(self.of, value)
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if type(value) is frozenset:
            return frozenset(map(self.of, value))
        return None

    def fill(self, original: Any, copy: Any) -> None:
        """Give the copy of a mutable object what the original has now."""
        if isinstance(copy, ScriptTwin):
            copy.follow(original, self.of)
        elif type(original) in DICTS or is_script_dict(original):
            _refill(copy, {self.of(key): self.of(item) for key, item in original.items()})
        elif type(original) in (*LISTS, *SETS):
            items = [self.of(item) for item in original]
            copy.clear()
            copy.update(items) if type(copy) is set else copy.extend(items)
        elif type(original) is CellType:
            if not _is_empty(original):
                copy.cell_contents = self.of(original.cell_contents)
        else:
            if type(copy) is not type(original):
                copy.__class__ = type(original)  # as parametrizations and lazy modules change it
            _refill(vars(copy), _values(vars(original), self.of))
            for name in slots_of(type(original)):
                if hasattr(original, name):
                    object.__setattr__(copy, name, self.of(getattr(original, name)))

    def _function(self, function: FunctionType) -> FunctionType:
        cells = tuple(self.of(cell) for cell in function.__closure__ or ())
        defaults = self.of(function.__defaults__)
        made = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
        made.__kwdefaults__ = None if function.__kwdefaults__ is None else _values(function.__kwdefaults__, self.of)
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        vars(made).update(_values(vars(function), self.of))
        return made


class Originals(Copies):
    """The other way round: copies of what refers to twins, which refer to the originals."""

    def __init__(self, copies: Copies) -> None:
        super().__init__()
        self.copies = copies

    def known(self, value: Any) -> tuple[Any, Any] | None:
        """The value and what it is a copy of."""
        original = self.copies.original(value)
        return super().known(value) if original is value else (value, original)


def parts(value: Any) -> Iterator[Any]:
    """What is reached from an object in one step, leaves left out."""
    return (part for part in _parts(value) if type(part) not in LEAVES and not isinstance(part, (Tensor, type)))


def _parts(value: Any) -> Iterable[Any]:
    kind = type(value)
    if kind in DICTS:
        return (*value.keys(), *value.values()) if len(value) <= MOST_ITEMS else ()
    if kind in LISTS or kind in SETS or isinstance(value, tuple):
        return tuple(value) if len(value) <= MOST_ITEMS else ()
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if kind is CellType:
        return () if _is_empty(value) else (value.cell_contents,)
    if isinstance(value, FunctionType):
        more = (*vars(value).values(), *(value.__kwdefaults__ or {}).values())
        return (*(value.__closure__ or ()), *(value.__defaults__ or ()), *more)
    if kind is partial:
        return value.func, *value.args, *value.keywords.values(), *vars(value).values()
    if kind is weakref.ref:
        return (value(),)
    if isinstance(value, nn.Module) or is_plain(value):
        slots = (getattr(value, name) for name in slots_of(kind) if hasattr(value, name))
        return (*vars(value).values(), *slots)
    return ()


def is_plain(value: Any) -> bool:
    """Whether it is an object of a class that is written in Python and keeps all it has in its attributes."""
    kind = type(value)
    return (
        type(getattr(value, "__dict__", None)) is dict
        and not isinstance(value, (Enum, type))
        and all(base is object or base.__flags__ & HEAP_TYPE for base in kind.__mro__)
        and kind.__module__.partition(".")[0] not in OUTSIDE
    )


def slots_of(kind: type) -> list[str]:
    """The attributes of such objects that are not in their `__dict__`."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _empty(value: Any) -> Any:
    """An object of the same class without contents; for a script module and its parts what its twin has."""
    kind = type(value)
    if isinstance(value, torch.jit.ScriptModule):
        return empty_twin(value)
    if is_script_dict(value):
        return {}
    if kind is CellType:
        return CellType()
    if kind is defaultdict:
        return defaultdict(value.default_factory)
    if kind is deque:
        return deque(maxlen=value.maxlen)
    return kind() if kind in (*DICTS, *LISTS, *SETS) else object.__new__(kind)


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _values(items: dict[str, Any], change: Any) -> dict[str, Any]:
    return {name: change(value) for name, value in items.items()}


def _refill(held: dict[Any, Any], new: dict[Any, Any]) -> None:
    """Let a dict hold this; what it holds already is not written again."""
    if list(held) != list(new):
        held.clear()
        held.update(new)
    else:
        for key, value in new.items():
            if held[key] is not value:
                held[key] = value
