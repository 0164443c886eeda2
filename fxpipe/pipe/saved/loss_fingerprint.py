"""The fingerprint of a loss function: everything that decides its values, as rows of text. A saved package refuses a
loss with another fingerprint.

    ("loss_fn", "function smooth 3f2a9c01b6d4")         a digest of its bytecode
    ("loss_fn.alpha", "0.1")                            its closure, defaults, and the globals that it names
    ("loss_fn.weight", "float32[10] 8be01f7a2c44")      for a tensor a digest of its values

Functions and classes of installed libraries have only their names. Of an object's attributes, only those that its code
names are included. Parameters and buffers of modules are not included: the user may change them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dis import get_instructions
from functools import lru_cache, partial
from hashlib import sha256
from inspect import getattr_static
from logging import Logger
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fxpipe.capture import NO_TARGET
from fxpipe.errors import PackageError
from fxpipe.pipe.drop_in_module import DropInModule
from fxpipe.torch_internals.tensor_memory import version_of

Rows = tuple[tuple[str, str], ...]
LOSS_FN = "loss_fn"
MOST = 24  # rows that are kept as text; the others become one digest
_digests: WeakIdKeyDictionary = WeakIdKeyDictionary()  # (version, digest) of code objects and tensors
TENSOR_ROW = re.compile(r"\w+\[[\d, ]*\]( \w+)?")
LIBRARIES = frozenset(("site-packages", "dist-packages"))
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(...), type(NO_TARGET))


def rows(loss_fn: Callable[..., Any] | None) -> Rows:
    """The fingerprint of a loss function; one row for None, when the model returns its loss."""
    return shortened(LOSS_FN, dict(rows_of(LOSS_FN, loss_fn, set())))


def shortened(name: str, found: Mapping[str, str]) -> Rows:
    """The first rows as they are, and one with a digest of the others, if there are more than `MOST`."""
    some, more = tuple(found.items())[:MOST], tuple(found.items())[MOST:]
    return (*some, (f"{name}...", f"{len(more)} more {digest(repr(more))}")) if more else some


def difference(known: Rows, found: Rows) -> str | None:
    """The first difference between two fingerprints, in words; None if they are equal."""
    old, new = dict(known), dict(found)
    for name in (*new, *old):
        if old.get(name) != new.get(name):
            return f"{name} is {new.get(name, 'not there')}, and this package was saved with {old.get(name, 'none')}"
    return None


def check_unchanged(captured: Rows, now: Rows) -> None:
    """Raise PackageError if a loss function has changed since its capture. The values of its tensors may have changed:
    they are saved as they are."""
    then = dict(captured)
    changed = [name for name, text in now if then.get(name) != text and not TENSOR_ROW.fullmatch(text)]
    if changed or len(now) != len(captured):
        what = ", ".join(changed) or LOSS_FN
        raise PackageError(f"{what} has changed since the step that was captured; call pipe.step(...), and save then")


def rows_of(name: str, value: Any, seen: set[int], reader: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """The rows of a value of any kind.

    - `seen`: the ids of what has rows already; it grows.
    - `reader`: the names in the code that has the value, some of which may be attributes of it.
    """
    if isinstance(value, DropInModule):
        value = value.model  # a loss may use the pipe's parameters, which are the model's
    if isinstance(value, PLAIN):
        yield name, repr(value)
    elif isinstance(value, Tensor):
        yield name, _tensor(value)
    elif id(value) in seen:
        yield name, "seen above"
    else:
        seen.add(id(value))
        yield from _parts(name, value, seen, reader)


def _parts(name: str, value: Any, seen: set[int], reader: frozenset[str]) -> Iterator[tuple[str, str]]:
    """The rows of an object that is neither plain nor a tensor, and of its parts."""
    held: Mapping[str, Any] = {}
    if isinstance(value, (tuple, list)):
        what, held = f"{type(value).__name__} of {len(value)}", {str(i): item for i, item in enumerate(value)}
    elif isinstance(value, Mapping):
        what, held = f"{type(value).__name__} of {len(value)}", {str(key): item for key, item in value.items()}
    elif isinstance(value, (set, frozenset)):
        what = repr(sorted(map(repr, value)))
    elif isinstance(value, partial):
        what, held = "partial", {"func": value.func, **{str(i): x for i, x in enumerate(value.args)}, **value.keywords}
    elif isinstance(value, MethodType):
        what, held = f"method {value.__func__.__qualname__}", {"func": value.__func__, "self": value.__self__}
    elif isinstance(value, Logger):
        what = "logger"  # what it is set to decides no value
    elif isinstance(value, (FunctionType, BuiltinFunctionType, type)) or not hasattr(value, "__dict__"):
        what, held = named(value), closed_over(value) if isinstance(value, FunctionType) else {}
        if isinstance(value, FunctionType):
            reader = frozenset(names_in(value.__code__) - set_by(value.__code__))
    else:
        what, held = named(type(value)), _attributes(value, reader)
        kind: type = type(value)
        reader |= _reads_and_sets(kind)[0]
    yield name, what
    for key, item in held.items():
        yield from rows_of(f"{name}.{key}", item, seen, reader)


def named(value: Any) -> str:
    """The row of a function or class: its name, and, if it is not a library's, a digest of its code."""
    kind = "class" if isinstance(value, type) else "function" if callable(value) else type(value).__qualname__
    if installed(value):
        return f"{kind} {_module(value)}.{value.__qualname__}"
    codes = " ".join(_digest_once(code, code, partial(_code, code)) for code in _codes(value))
    return f"{kind} {getattr(value, '__name__', '')} {digest(codes) if ' ' in codes else codes}".rstrip()


def installed(value: Any) -> bool:
    """Whether a function or class is of Python or of an installed library."""
    return hasattr(value, "__qualname__") and _of_library(_module(value))


def _module(value: Any) -> str:
    """The module of a function or class; "builtins" if it has none, as a method of a tensor."""
    return str(getattr(value, "__module__", None) or "builtins")


def _of_library(module: str) -> bool:
    """Whether a module is of Python's standard library, or in a folder of installed packages."""
    file = getattr(sys.modules.get(module), "__file__", None)
    installed = file is not None and not LIBRARIES.isdisjoint(PurePath(file).parts)
    return installed or module.partition(".")[0] in sys.stdlib_module_names


def _codes(value: Any) -> list[CodeType]:
    """The code of a function, or of all methods of a class and of those it inherits from, libraries' left out."""
    if isinstance(value, FunctionType):
        return [value.__code__]
    kinds = [kind for kind in getattr(value, "__mro__", ()) if not installed(kind)]
    found = (getattr(item, "__func__", item) for kind in kinds for item in vars(kind).values())
    return [item.__code__ for item in found if isinstance(item, FunctionType)]


def _code(code: CodeType) -> str:
    """A text for compiled code, which does not depend on its file and lines."""
    constants = [_code(item) if isinstance(item, CodeType) else _constant(item) for item in code.co_consts]
    version = ".".join(map(str, sys.version_info[:2]))
    return repr((version, code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars))


def _constant(value: Any) -> str:
    """The text of a constant; sets are sorted, because their order differs between processes."""
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def digest(text: str | bytes) -> str:
    return sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:12]


def _digest_once(value: Any, version: object, text: Callable[[], str | bytes]) -> str:
    """The digest of `text()`, cached for `value` as long as its version stays the same."""
    known = _digests[value] if value in _digests else None  # noqa: SIM401
    if known is None or known[0] != version:
        known = _digests[value] = version, digest(text())
    found: str = known[1]
    return found


def names_in(code: CodeType) -> set[str]:
    """All names that the code reads, with those of functions inside."""
    inner = (names_in(item) for item in code.co_consts if isinstance(item, CodeType))
    return set(code.co_names).union(*inner)


@lru_cache(maxsize=1024)
def set_by(code: CodeType) -> frozenset[str]:
    """The attributes that a method sets."""
    return frozenset(found.argval for found in get_instructions(code) if found.opname == "STORE_ATTR")


def closed_over(function: FunctionType) -> dict[str, Any]:
    """The values that a user's function uses, by name: defaults, closure, and the globals that it names."""
    if installed(function):
        return {}
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    held = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | (function.__kwdefaults__ or {})
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not yet filled
            continue
    names_read = sorted(names_in(code))
    held |= {name: function.__globals__[name] for name in names_read if name in function.__globals__}
    modules = {name: value for name, value in held.items() if isinstance(value, ModuleType)}
    inside = {
        f"{name}.{part}": getattr(module, part)
        for name, module in modules.items()
        if not _of_library(module.__name__)
        for part in names_read
        if hasattr(module, part)
    }
    return {name: value for name, value in (held | inside).items() if not isinstance(value, ModuleType)}


@lru_cache(maxsize=1024)
def _reads_and_sets(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """The names in the code of a class, and the attributes that it sets."""
    methods = [item for one in kind.__mro__[:-1] if one is not nn.Module for item in vars(one).values()]
    codes = [item.__code__ for item in methods if isinstance(item, FunctionType) and item.__name__ != "__init__"]
    return frozenset[str]().union(*map(names_in, codes)), frozenset[str]().union(*map(set_by, codes))


def _attributes(value: Any, reader: frozenset[str]) -> dict[str, Any]:
    """The attributes of an object that its class's code names, or the reader's; of a module without its parameters and
    buffers."""
    kind: type = type(value)
    own, changed = _reads_and_sets(kind)
    # Attributes that the loss itself sets, such as a counter, are left out: otherwise no package could be saved.
    read = (own if isinstance(value, nn.Module) else own | reader) - changed
    found = {name: item for name, item in vars(value).items() if name in read}
    if isinstance(value, nn.Module):
        found |= {"training": value.training, **dict(value.named_children())}
        found = {name: item for name, item in found.items() if not name.startswith("_") or name in read}
    used = {name: getattr_static(type(value), name, None) for name in read if name not in found}
    properties = {name: item.fget for name, item in used.items() if isinstance(item, property) and item.fget}
    return dict(sorted(found.items())) | dict(sorted(properties.items()))


def _tensor(tensor: Tensor) -> str:
    """The row of a tensor: its type, and a digest of its values unless it is a parameter or has none."""
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.is_meta or tensor.layout != torch.strided or isinstance(tensor, nn.Parameter):
        return kind
    version = version_of(tensor), tensor.data_ptr()
    return f"{kind} {_digest_once(tensor, version, lambda: bytes(_flat(tensor).view(torch.uint8)))}"


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().flatten()
