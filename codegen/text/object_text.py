"""How Python objects are written in source: functions and classes by a public, importable name; values as literals.

What has no spelling (a lambda, a tensor) is an error here; it never becomes a `repr` that means something else.
"""

from __future__ import annotations

import enum
import inspect
import keyword
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fxpipe.codegen.text.line_layout import Brackets, Doc, flat, prefix
from fxpipe.codegen.text.number_text import module_of, number
from fxpipe.codegen.text.source_names import member, string
from fxpipe.ir.graph.graph import Ref, Struct
from fxpipe.ir.program.program import OwnDevice, RuntimeCall
from fxpipe.torch_internals.operator_classes import HigherOrderOperator, OpOverload, OpOverloadPacket, padding

Names = Callable[[str], str]  # what a value or state is called in the source: `x_1`, `self.conv.weight`


class Spelling(NamedTuple):
    """How an object is written, and the module that the file must import for it ("" for none)."""

    text: str
    module: str


_PUBLIC = {"F": F, "torch": torch, "torch.special": torch.special, "torch.linalg": torch.linalg, "torch.fft": torch.fft,
           "math": math, "operator": operator}  # fmt: skip
_MODULES = {"F": "torch.nn.functional", "math": "math", "operator": "operator"}


@lru_cache(maxsize=1)
def _public_names() -> dict[int, str]:
    """The public name of each function of torch, by identity; the first module of `_PUBLIC` that has it wins."""
    names: dict[int, str] = {}
    for prefix_, module in _PUBLIC.items():
        found = [n for n in dir(module) if not n.startswith("_") and callable(getattr(module, n))]
        found.sort(key=lambda n: (getattr(getattr(module, n), "__name__", "") != n, n))
        for name in found:
            item = getattr(module, name)
            ours = prefix_ != "F" or not isinstance(item, type)
            if ours and not inspect.ismodule(item):
                names.setdefault(id(item), f"{prefix_}.{name}")
    names[id(padding())] = "F.pad"
    return names


@lru_cache(maxsize=4096)
def spell(target: Any) -> Spelling:
    """How a function or class is written. Raises ValueError if no import leads to it."""
    public = _public_names().get(id(target))
    if public is not None:
        return Spelling(public, _MODULES.get(public.partition(".")[0], "torch"))
    if isinstance(target, RuntimeCall):
        return Spelling(target.name, "")  # the stage imports it beside its base class
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        return Spelling(f"torch.ops.{target}", "torch")
    if isinstance(target, HigherOrderOperator):
        return Spelling(f"torch.ops.higher_order.{target}", "torch")
    return _spell_by_import(target)


def _spell_by_import(target: Any) -> Spelling:
    for module, path in _places(target):
        found = _walk(module, path)
        if found is target or _same_method(found, target):
            if module == "builtins":
                return Spelling(path, "")
            return Spelling(f"{module}.{path}", "torch" if module.startswith("torch._C") else module)
    name = getattr(target, "__qualname__", None) or repr(target)
    raise ValueError(
        f"{name} (in {getattr(target, '__module__', None)}) cannot be imported by its name; "
        "define it at the top level of a module"
    )


def _places(target: Any) -> Iterator[tuple[str, str]]:
    """Where the object says that it lives."""
    owner = getattr(target, "__self__", None)
    name = getattr(target, "__name__", None)
    if isinstance(owner, type) and name:
        yield owner.__module__, f"{owner.__qualname__}.{name}"
    objclass = getattr(target, "__objclass__", None)
    if objclass is not None and name:
        yield "torch", f"Tensor.{name}"
        yield objclass.__module__, f"{objclass.__qualname__}.{name}"
    module = getattr(target, "__module__", None) or "builtins"
    for path in (getattr(target, "__qualname__", None), name):
        if path and all(part.isidentifier() and not keyword.iskeyword(part) for part in path.split(".")):
            yield module, path


def _walk(module: str, path: str) -> Any:
    """The object at a dotted path in a module that is loaded; None if there is none."""
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in module.split(".")):
        return None
    item = sys.modules.get(module)
    for part in path.split("."):
        item = getattr(item, part, None)
    return item


def _same_method(found: Any, target: Any) -> bool:
    """A class method read twice gives two objects, equal but not the same."""
    return found is not None and hasattr(target, "__self__") and bool(found == target)


def nest(value: Any, names: Names) -> Doc:
    """The source of an argument: literals, references, and nests of them."""
    if isinstance(value, Ref):
        return names(value.name)
    if isinstance(value, Struct):
        fields = tuple(prefix(f"{name}=", nest(item, names)) for name, item in value.fields)
        return Brackets(f"{spell(value.cls).text}(", fields, ")")
    if isinstance(value, torch.Size):
        return Brackets("torch.Size(", (nest(tuple(value), names),), ")")
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = tuple(prefix(f"{name}=", nest(getattr(value, name), names)) for name in value._fields)
        return Brackets(f"{spell(type(value)).text}(", fields, ")")
    if type(value) in (tuple, list):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        return Brackets(opening, tuple(nest(item, names) for item in value), closing, "literal")
    if isinstance(value, Mapping):
        items = ((flat(nest(key, names)), nest(item, names)) for key, item in value.items())
        return Brackets("{", tuple(prefix(f"{key}: ", item) for key, item in items), "}", "literal")
    if isinstance(value, (set, frozenset)):
        return _set(value, names)
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step) if value.step is not None else (value.start, value.stop)
        return Brackets("slice(", tuple(nest(part, names) for part in parts), ")")
    return scalar(value)


def _set(value: set[Any] | frozenset[Any], names: Names) -> Doc:
    items = tuple(sorted((nest(item, names) for item in value), key=flat))
    braces: Doc = Brackets("{", items, "}", "literal") if items else "set()"
    if isinstance(value, set):
        return braces
    return Brackets("frozenset(", (braces,) if items else (), ")")


def literal(value: Any) -> Doc:
    """The source of a value without references. Raises ValueError for what has no literal form."""
    return nest(value, _no_names)


def _no_names(name: str) -> str:
    raise ValueError(f"{name!r} is a value of the model, not a literal")


def scalar(value: Any) -> str:
    """The source of one indivisible literal."""
    if value is None or isinstance(value, bool):
        return str(value)
    if value is Ellipsis:
        return "..."
    if isinstance(value, OwnDevice):
        return "self.device"
    if isinstance(value, enum.Enum):
        return _enum(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, complex):
        return f"complex({number(value.real)}, {number(value.imag)})"
    if isinstance(value, str):
        return string(str(value))
    if isinstance(value, bytes):
        return "b" + string(value.decode("latin-1"))
    return _torch_literal(value)


def _torch_literal(value: Any) -> str:
    if isinstance(value, torch.device):
        return f"torch.device({string(str(value))})"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return repr(value)
    if isinstance(value, range):
        return repr(value)
    if isinstance(value, type) or (callable(value) and not isinstance(value, torch.nn.Module)):
        return spell(value).text
    raise ValueError(f"a {type(value).__qualname__} cannot be written as a literal: {string(repr(value)[:80])}")


def _enum(value: enum.Enum) -> str:
    kind = spell(type(value)).text
    known = value.name is not None and value.name in type(value).__members__
    return member(kind, value.name) if known else f"{kind}({scalar(value.value)})"


def modules_of(value: Any) -> Iterator[str]:
    if type(value) in (Ref, bool, int, str, type(None)):
        return
    if isinstance(value, Struct):
        yield spell(value.cls).module
        yield from modules_of([item for _, item in value.fields])
    elif isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        yield "torch"
    elif isinstance(value, (float, complex)):
        yield from filter(None, map(module_of, (value.real, value.imag)))
    elif isinstance(value, (tuple, list, set, frozenset)):
        if isinstance(value, torch.Size) or hasattr(value, "_fields"):
            yield spell(type(value)).module if not isinstance(value, torch.Size) else "torch"
        for item in value:
            yield from modules_of(item)
    elif isinstance(value, Mapping):
        yield from modules_of([*value.keys(), *value.values()])
    elif isinstance(value, slice):
        yield from modules_of((value.start, value.stop, value.step))
    elif isinstance(value, enum.Enum):
        yield spell(type(value)).module
    elif isinstance(value, type) or (callable(value) and not isinstance(value, (Ref, torch.nn.Module))):
        yield spell(value).module
