"""Walks the arguments and results of a model: tuples, lists, dicts, dataclasses, named tuples and other classes.

torch's pytree stops at classes that are not registered with it. A tensor in such a class would be captured as a
constant: right in the first call, wrong in every later one. So this walk enters the attributes of any object. Paths are
as the user would write them: `batch['ids']`, `state.hidden[0]`.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Never

import torch
from torch import Tensor

from fxpipe.ir.graph.graph import Ref, Struct

Swap = Callable[[str, Tensor], Any]
Memo = dict[int, tuple[Any, Any]]  # by the id of an object, it and what it was changed to

PLAIN = (type(None), bool, int, float, complex, str, bytes, slice, range, type, type(...))
CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType)
TORCH = (torch.dtype, torch.device, torch.Size, torch.Generator, torch.memory_format, torch.layout)
ATOMS = frozenset((*PLAIN, *CODE, *TORCH))
DEPTH = 12  # objects that hold each other end here
LONGEST = 200  # characters of a nest in a message


class HiddenItems:
    """A base of lists and tuples that end a trace which looks into them. Walks look into their attributes, and not into
    their items."""

    end_trace: Callable[[], Never]

    def __copy__(self) -> Any:
        made = type(self).__new__(type(self))
        vars(made).update(vars(self))
        return made


def change(value: Any, swap: Swap, path: str = "", depth: int = 0, memo: Memo | None = None) -> Any:
    """The nest with `swap(path, tensor)` in place of every tensor. Parts without a changed tensor are returned as they
    are; parts with one are copied, never written. With a `memo`, an object that is met again is changed to the same;
    what is in the memo already is taken from there."""
    if isinstance(value, Tensor):
        return swap(path, value)
    kind = type(value)
    if kind in ATOMS or depth > DEPTH or isinstance(value, (torch.nn.Module, type, torch.SymInt)):
        return value
    if memo is not None and (known := memo.get(id(value))) is not None:
        return known[1]
    if isinstance(value, (tuple, list, deque)) and not isinstance(value, HiddenItems):
        made = _change_items(value, swap, path, depth, memo)
    else:
        made = _change_object(value, swap, path, depth, memo)
    if memo is not None:
        memo[id(value)] = value, made
    return made


def _change_items(value: Any, swap: Swap, path: str, depth: int, memo: Memo | None) -> Any:
    """`change` for tuples and lists."""
    names = [f".{name}" for name in getattr(value, "_fields", ())] or [f"[{i}]" for i in range(len(value))]
    items = [change(item, swap, path + name, depth + 1, memo) for name, item in zip(names, value, strict=True)]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if isinstance(value, deque):
        return type(value)(items, value.maxlen)
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _change_object(value: Any, swap: Swap, path: str, depth: int, memo: Memo | None) -> Any:
    """`change` for dicts and objects; a class such as ModelOutput is both."""
    items: dict[Any, Any] = {}
    if isinstance(value, Mapping):
        items = _changed({k: (f"{path}[{k!r}]", v) for k, v in value.items()}, swap, depth, memo)
    fields = _changed({k: (f"{path}.{k}", v) for k, v in attributes(value).items()}, swap, depth, memo)
    if not items and not fields:
        return value
    made = copy.copy(value)
    for key, item in items.items():
        made[key] = item
    for name, item in fields.items():
        object.__setattr__(made, name, item)
    return made


def _changed(items: dict[Any, tuple[str, Any]], swap: Swap, depth: int, memo: Memo | None) -> dict[Any, Any]:
    new = {key: change(item, swap, path, depth + 1, memo) for key, (path, item) in items.items()}
    return {key: item for key, item in new.items() if item is not items[key][1]}


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object that may hold tensors."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
    return dict(getattr(value, "__dict__", ()))


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether the value is a tensor, a literal, a set of literals, or a list, tuple or dict of all these, so that the
    walk sees all tensors in it.

    >>> is_plain([{"a": torch.ones(1)}, {1, "b"}]), is_plain(object()), is_plain({object()})
    (True, False, False)
    """
    kind = type(value)
    if kind in (set, frozenset):
        return all(type(item) in ATOMS for item in value)
    if isinstance(value, (Tensor, int, weakref.ref)) or kind in ATOMS:
        return True
    if kind not in (list, tuple, dict) or depth > DEPTH:
        return False
    return all(is_plain(item, depth + 1) for item in (value.values() if kind is dict else value))


def template(value: Any, ref: Callable[[Any], Ref | None], depth: int = 0) -> Any:
    """The nest as a graph keeps it: a `Ref` wherever `ref(leaf)` knows a leaf, `Struct` for objects, literals else."""
    found = ref(value)
    if found is not None:
        return found
    kind = type(value)
    if kind in ATOMS or depth > DEPTH or isinstance(value, (Tensor, torch.nn.Module, type)):
        return value
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        return Struct(kind, tuple((n, template(getattr(value, n), ref, depth + 1)) for n in names))
    if isinstance(value, (tuple, list)) and not isinstance(value, HiddenItems):
        items = [template(item, ref, depth + 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping) and not dataclasses.is_dataclass(value):
        return {key: template(item, ref, depth + 1) for key, item in value.items()}
    fields = tuple((n, template(item, ref, depth + 1)) for n, item in attributes(value).items())
    return Struct(kind, fields) if fields else value


def spelled(value: Any, leaf: Callable[[Any], str | None]) -> str:
    """The nest in a line of a message, with `leaf(part)` in place of parts for which that is not None.

    >>> spelled({"ids": (3, None), "x": [1.5]}, lambda part: "a number" if part == 3 else None)
    "{'ids': (a number, None), 'x': [1.5]}"
    """
    text = _spelled(value, leaf, 0)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _spelled(value: Any, leaf: Callable[[Any], str | None], depth: int) -> str:
    if (found := leaf(value)) is not None:
        return found
    kind, parts = type(value), parts_of(value)
    if depth > DEPTH or (not parts and kind not in (tuple, list, dict)):
        return repr(value) if kind in (type(None), bool, int, float, str) else kind.__name__
    items = [(path, _spelled(part, leaf, depth + 1)) for path, part in parts]
    if isinstance(value, Struct) or any(path.startswith(".") for path, _ in parts):
        cls = value.cls if isinstance(value, Struct) else kind
        return f"{cls.__name__}({', '.join(f'{path[1:]}={text}' for path, text in items)})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{path[1:-1]}: {text}" for path, text in items) + "}"
    texts = ", ".join(text for _, text in items)
    return f"[{texts}]" if isinstance(value, list) else f"({texts}{',' * (len(items) == 1)})"


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """The parts of a value or of a template, each with how a user writes it after the value's name."""
    if isinstance(value, Struct):
        return [(f".{name}", part) for name, part in value.fields]
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        return [(f".{name}", getattr(value, name)) for name in names]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    shown = isinstance(value, (tuple, list, deque)) and not isinstance(value, HiddenItems)
    return [(f"[{i}]", part) for i, part in enumerate(value)] if shown else []
