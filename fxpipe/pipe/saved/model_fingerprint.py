"""The fingerprint of a model: what decides which graph it is captured as. A saved package has that of the model that it
was made from, as `model.json`, and refuses a model with another one: nothing is captured that would notice.

    classes    Block       forward             function forward 3f2a9c01b6d4    a digest of its bytecode
                           forward.SCALE       0.125                            what it uses: globals, closure, defaults
    modules    h.0         class               Block
                           layer_idx           0                                attributes that its code reads
               h.0.ln_1    class               LayerNorm
                           weight              float32[32]                      parameters: type and shape
               lm_head     weight              wte.weight                       tied: the tensor of this name

What counts is the code that `forward` may reach in the user's classes, and what that code uses, as for a loss function.
Classes and functions of installed libraries have only their names. The values of parameters and buffers do not count;
nor do attributes that the same code sets, such as counters.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import getsourcefile, getsourcelines
from pathlib import Path, PurePath
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from fxpipe.errors import PackageError
from fxpipe.ir.dataclass_json import read, write

from .loss_fingerprint import TENSOR_ROW, digest, installed, named, names_in, rows_of, set_by, shortened

FILE = "model.json"
DIGEST = re.compile(r" [0-9a-f]{12}$")
MOST = 10  # differences that an error names
BEGIN = ("forward", "__call__", "__getattr__", "__getattribute__")  # where a call enters the code of a module
OWN = frozenset(("_parameters", "_buffers", "_modules", "training"))  # of every module; rows of their own, or none


@dataclass(frozen=True)
class Fingerprint:
    """What decides the graph of a model.

    - `python`: the version whose bytecode the digests are of.
    - `classes`: for each class, by name, rows of the code that it runs.
    - `modules`: for each submodule, by path, rows of its class, parameters, attributes and hooks.
    """

    python: str
    classes: Mapping[str, Mapping[str, str]]
    modules: Mapping[str, Mapping[str, str]]


def fingerprint(model: nn.Module) -> Fingerprint:
    """The fingerprint of a model as it is now."""
    names: dict[type, str] = {}
    classes: dict[str, Mapping[str, str]] = {}
    modules: dict[str, Mapping[str, str]] = {}
    known: dict[int, str] = {}  # the first path of each submodule and parameter
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in known:
            modules[path] = {"same as": known[id(module)]}
            continue
        known[id(module)], kind = path, type(module)
        if kind not in names:
            name, number = kind.__qualname__, 2
            while name in classes:
                name, number = f"{kind.__qualname__} {number}", number + 1
            names[kind], classes[name] = name, _of_class(kind)
        modules[path] = {"class": names[kind], **_of_parameters(path, module, known), **_of_attributes(module)}
    return Fingerprint(".".join(map(str, sys.version_info[:2])), classes, modules)


def check_fits(saved: Fingerprint, model: nn.Module) -> None:
    """Raise PackageError, with the submodules that differ, if the model is not what the package was made from."""
    now = fingerprint(model)
    if saved.python != now.python:
        raise PackageError(
            f"the package was saved with Python {saved.python}, and this is Python {now.python}: code is compared as "
            "bytecode, so save the package anew with this one"
        )
    faults = list(_differences(saved, now))
    if faults:
        more = [f"and {len(faults) - MOST} more"] if len(faults) > MOST else []
        named_faults = (f"{text}{_place(model, path)}" for path, text in faults[:MOST])
        lines = "".join(f"\n  {fault}" for fault in (*named_faults, *more))
        raise PackageError(
            f"the package was made for {saved.modules['']['class']}; this {type(model).__name__} does not fit:{lines}\n"
            "Load it with the model that it was saved from, or save another package"
        )


def check_same(captured: Fingerprint, model: nn.Module) -> None:
    """Raise PackageError if a model has changed since its capture. Its tensors may have: they are not in a package."""
    text = next((text for _, text in _differences(captured, fingerprint(model), tensors=False)), None)
    if text is not None:
        raise PackageError(f"the model has changed since it was captured: {text}; call the pipe again, and save then")


def load(folder: Path) -> Fingerprint:
    """The fingerprint in the folder of a package. Raises PackageError if there is none, or it cannot be read."""
    file = folder / FILE
    try:
        found = read(Fingerprint, file.read_text(encoding="utf-8"))
        known = "" in found.modules and all({"class", "same as"} & rows.keys() for rows in found.modules.values())
    except (OSError, ValueError) as error:
        raise PackageError(f"{file} cannot be read: {error}; save the package anew") from None
    if not known:
        raise PackageError(f"{file} does not say the class of every module; save the package anew")
    return found


def text_of(found: Fingerprint) -> str:
    """The fingerprint as the text of its file; `load` reads it back."""
    return write(found)


# What counts ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _reached(kind: type) -> Mapping[str, FunctionType]:
    """The methods and properties of a class that its `forward` may reach, by name; nn.Module's own are left out."""
    found: dict[str, FunctionType] = {}
    waiting = list(BEGIN)
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        owner = next((one for one in kind.__mro__ if name in vars(one)), nn.Module)
        item = vars(owner).get(name)
        if owner is nn.Module or item is None:
            continue
        function = getattr(item, "fget", None) or getattr(item, "__func__", item)
        if isinstance(function, FunctionType):
            found[name] = function
            news = names_in(function.__code__) - seen
            seen |= news
            waiting += news
    return dict(sorted(found.items()))


@lru_cache(maxsize=1024)
def _reads(kind: type) -> frozenset[str]:
    """The names that the code of a class reads and does not set: attributes of these names count."""
    codes = [function.__code__ for function in _reached(kind).values()]
    changed = {name for code in codes for name in _with_inner(code, set_by)}
    return frozenset({"forward"}.union(*map(names_in, codes)) - changed - OWN)


def _with_inner(code: CodeType, names: Any) -> frozenset[str]:
    """The names of a piece of code, and of the functions inside."""
    inner = (_with_inner(item, names) for item in code.co_consts if isinstance(item, CodeType))
    found: frozenset[str] = frozenset(names(code)).union(*inner)
    return found


def _of_class(kind: type) -> Mapping[str, str]:
    """The rows of the code that modules of a class run."""
    if installed(kind):
        return {"": named(kind)}
    seen: set[int] = {id(kind)}
    rows = {key: text for name, item in _reached(kind).items() for key, text in rows_of(name, item, seen)}
    return dict(shortened("code", rows))


def _of_parameters(path: str, module: nn.Module, known: dict[int, str]) -> dict[str, str]:
    """The rows of a module's own parameters."""
    found: dict[str, str] = {}
    for name, tensor in module._parameters.items():
        if tensor is None:
            found[name] = "None"
        elif id(tensor) in known:
            found[name] = known[id(tensor)]
        else:
            known[id(tensor)] = f"{path}.{name}".removeprefix(".")
            lazy = is_lazy(tensor)
            found[name] = "no shape yet" if lazy else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return found


def _of_attributes(module: nn.Module) -> dict[str, str]:
    """The rows of a module's attributes, and of its hooks."""
    kind: type = type(module)
    seen = {id(module), *map(id, module._modules.values())}
    reads = frozenset[str]() if isinstance(module, torch.jit.ScriptModule) else _reads(kind)
    held = {name: value for name, value in vars(module).items() if name in reads}
    rows = dict(row for name in sorted(held) for row in rows_of(name, held[name], seen, reads))
    if isinstance(module, torch.jit.ScriptModule) and hasattr(module, "code"):
        rows["graph"] = digest(re.sub(r"\.___torch_mangle_\d+", "", module.code))  # a number for each module made
    if isinstance(module, fx.GraphModule):
        rows["graph"] = digest(module.code)
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    rows |= {
        f"hook {at}": named(hook if isinstance(hook, FunctionType) else type(hook)) for at, hook in enumerate(hooks)
    }
    return dict(shortened("attributes", rows))


# What differs ---------------------------------------------------------------------------------------------------------


def _differences(saved: Fingerprint, now: Fingerprint, tensors: bool = True) -> Iterator[tuple[str, str]]:
    """The (path, text) of each difference: the path of the module, and what differs in words. Without `tensors`, rows
    of tensors are left out."""
    told: set[str] = set()
    for path in dict.fromkeys((*saved.modules, *now.modules)):
        old, new = saved.modules.get(path), now.modules.get(path)
        if old is None or new is None:
            gone = [f"{path}.{key}".removeprefix(".") for key, row in (old or {}).items() if _is_tensor(row)]
            missing = ", and with it ".join(filter(None, ("missing", ", ".join(gone))))
            yield path, f"{path}: {missing if new is None else 'is not in the package'}"
            continue
        for key in dict.fromkeys((*old, *new)):
            was, found = old.get(key, "not there"), new.get(key, "not there")
            if was == found or (key != "class" and not tensors and _is_tensor(was) and _is_tensor(found)):
                continue
            if not (_is_tensor(found) and was.startswith(f"{found} ")):  # on the meta device it has no values
                where = ".".join(part for part in (path, key if key != "class" else "") if part)
                yield path, f"{where}: {found}, expected {was}".removeprefix(": ")
        kind = new.get("class", "")
        if kind == old.get("class") and kind not in told:
            told.add(kind)
            for key, change in _changed_code(saved.classes.get(kind, {}), now.classes.get(kind, {})):
                yield path, f"{path}: the code of {kind}{key} differs{change}".removeprefix(": ")


def _changed_code(saved: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The (name, change) of each row of a class that differs. Of code only the digest is known, which says nothing."""
    for key in dict.fromkeys((*saved, *now)):
        was, found = saved.get(key, "not there"), now.get(key, "not there")
        if was != found:
            plain = [DIGEST.sub("", text) for text in (was, found)]
            yield f".{key}".rstrip("."), "" if plain[0] == plain[1] else f": {plain[1]}, expected {plain[0]}"


def _is_tensor(row: str) -> bool:
    return TENSOR_ROW.fullmatch(row) is not None


def _place(model: nn.Module, path: str) -> str:
    """Where the class of a submodule is written: its own, or, for a library's, that of the module around it."""
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        try:
            kind: Any = type(model.get_submodule(".".join(parts[:depth])))
        except AttributeError:  # it is missing
            continue
        if not installed(kind):
            return f"  ({'' if depth == len(parts) else 'in '}{kind.__name__}, {_line(kind)})"
    return ""


def _line(kind: type[nn.Module]) -> str:
    """The file and line of a class; of its forward, if the class is not in a file."""
    try:
        file, line = getsourcefile(kind) or "", getsourcelines(kind)[1]
    except (OSError, TypeError):
        code = getattr(kind.forward, "__code__", None)
        file, line = (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)
    return f"{PurePath(file).name}:{line}"
