"""From files to a pipeline that runs: imports the package, and gives its stages the model's tensors.

A package is imported from its files by Python's own import system, so tracebacks and pdb show the code that runs. Two
things differ from a plain import. Each load makes a new module, so that packages with the same file names do not clash.
And no bytecode is cached: Python compares a cache with its source by whole seconds and size, and would run the old code
after a quick edit.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Collection, Mapping
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from fxpipe.codegen.package.package_files import CONSTANTS, FORMAT, PUBLIC
from fxpipe.codegen.scheduler.value_locations import torch_device
from fxpipe.errors import PackageError, PlanError
from fxpipe.ir.graph.opaque_call import Opaque
from fxpipe.runtime.accelerator import count, is_here
from fxpipe.runtime.stage import Stage, sources_of
from fxpipe.torch_internals.moved_tensors import move_to


class _Uncached(SourceFileLoader):
    """Compiles the source at each import."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def load_package(folder: str | Path) -> ModuleType:
    """Import the package in `folder`, as it is on the disk now. Raises PackageError if it is none, or damaged."""
    path = Path(folder).resolve()
    init = path / "__init__.py"
    if not init.is_file():
        raise PackageError(f"{folder} is not a package that fxpipe has saved: it has no __init__.py")
    name = f"fxpipe_package_{uuid4().hex}"  # no counter: without an interpreter lock two threads may draw one number
    # Where Python keeps the finder for a folder: submodules of the package are found by this one.
    sys.path_importer_cache[str(path)] = FileFinder(str(path), (_Uncached, SOURCE_SUFFIXES))
    loader = _Uncached(name, str(init))
    spec = spec_from_file_location(name, init, loader=loader, submodule_search_locations=[str(path)])
    assert spec is not None  # as a loader is given
    module = module_from_spec(spec)
    sys.modules[name] = module
    for file in path.glob("*.py"):
        linecache.cache.pop(str(file), None)
    try:
        loader.exec_module(module)
        _check_package(module, init)
    except PackageError:
        unload(module)
        raise
    except Exception as error:
        unload(module)
        raise _damaged(path, error) from error
    except BaseException:
        unload(module)
        raise
    return module


def _check_package(module: ModuleType, init: Path) -> None:
    found = getattr(module, "FORMAT", 1)
    if found != FORMAT:
        raise PackageError(
            f"{init} is of format {found}, and this fxpipe reads {FORMAT}: save the package anew, with this fxpipe"
        )
    missing = [name for name in PUBLIC if not hasattr(module, name)]
    missing += ["LOSS"] if hasattr(module, "OUTPUTS") and not hasattr(module, "LOSS") else []
    if missing:
        raise PackageError(f"{init} does not say {', '.join(missing)}: it is damaged; save the package anew")


def _damaged(path: Path, error: Exception) -> PackageError:
    """The error for files that cannot be imported; it names the last line in them that the error comes from."""
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    lines += [(error.filename or "", error.lineno)] if isinstance(error, SyntaxError) else []
    file, line = next((place for place in reversed(lines) if Path(place[0]).parent == path), (str(path), None))
    where = f"{file}:{line}" if line else file
    missing = str(error.name).rpartition(".")[2] if isinstance(error, ModuleNotFoundError) else ""
    if missing and error.name and error.name.startswith("fxpipe_package_"):  # type: ignore[attr-defined]
        return PackageError(f"{path / missing}.py is not there, which {where} imports: save the package anew")
    return PackageError(f"{where} cannot be imported, {type(error).__name__}: {error}; correct it, or save anew")


def unload(module: ModuleType) -> None:
    """Remove a loaded package from Python's caches; objects that use it keep it alive."""
    own = f"{module.__name__}."
    for name in list(sys.modules):  # at once: other threads may import meanwhile
        if (name + ".").startswith(own):
            linecache.cache.pop(sys.modules.pop(name).__file__ or "", None)
    for folder in module.__path__:
        sys.path_importer_cache.pop(folder, None)


def bind(
    module: ModuleType,
    model: nn.Module,
    constants: Mapping[str, Any] | None = None,
    others: Mapping[str, Tensor] | None = None,
    calls: Mapping[str, Opaque] | None = None,
    *,
    move: bool = True,
    stay: Collection[str] = (),
) -> Any:
    """The package's scheduler; its stages hold the model's own parameters and buffers.

    - `constants`: read from the folder if not given; those on another device are copied.
    - `others`: tensors that the model does not have, such as those of a loss function, by path.
    - `calls`: the submodules that are called whole; if not given the model's own, whose results are not checked.
    - `move`: whether the model's tensors move to the devices of their stages, in place; else, and for those at the
      paths of `stay`, stages on another device have copies.

    Raises PackageError, and changes nothing, if the model does not fit; PlanError if a device is missing."""
    stages, whole, epilogue = bound_stages(module, model, constants, others, calls, move=move, stay=stay)
    return module.Scheduler(stages, whole, epilogue)


def bound_stages(
    module: ModuleType,
    model: nn.Module,
    constants: Mapping[str, Any] | None = None,
    others: Mapping[str, Tensor] | None = None,
    calls: Mapping[str, Opaque] | None = None,
    *,
    move: bool = True,
    stay: Collection[str] = (),
    here: Mapping[str, torch.device] | None = None,
) -> tuple[list[Any], Any, Any]:
    """The arguments of the scheduler: the stages with the model's tensors, and what computes the totals and the
    epilogue of the whole batch, or None. Arguments as in `bind`. `here`: the devices of this process, by label; stages
    on other devices are None."""
    devices, replicas = module.Scheduler.devices, module.Scheduler.replicas
    placed = [(j, label) for j, first in enumerate(devices) for label in (first, *(replicas[j] if replicas else ()))]
    known = {label: worker_device(label) for _, label in placed} if here is None else here
    for stage, label in placed:
        if label in known:
            _check_device(stage, known[label])
    totals, epilogue = getattr(module, "TOTALS", ()), getattr(module, "EPILOGUE", ())
    # Every process computes totals for itself; the epilogue runs where a stage gives what it takes.
    whole_device = known.get(devices[-1]) or next(iter(known.values()))
    kinds = [(kind, known.get(label)) for kind, label in zip(module.STAGES, devices, strict=True)]
    kinds += [(kind, whole_device) for kind in totals] + [
        (kind, known.get(devices[module.Scheduler.epilogue_stage])) for kind in epilogue
    ]
    kinds += [
        (kind, known.get(label)) for kind, labels in zip(module.STAGES, replicas, strict=False) for label in labels
    ]
    sources = [sources_of(kind) for kind, _ in kinds]
    used = {
        own.get(path, path)
        for (kind, device), own in zip(kinds, sources, strict=True)
        if device is not None
        for path in kind.states
    }
    tensors = _tensors(module, model, others or {}, used)
    held = _load_constants(module) if constants is None else constants
    submodules = {
        path: (calls or {}).get(path) or _whole(model, path, kind) for kind, _ in kinds for path in kind.opaque
    }
    stages: list[Any] = []
    for at, (kind, device) in enumerate(kinds):
        if device is None:
            stages.append(None)
            continue
        for name in kind.constants:
            if name not in held:
                raise PackageError(f"the package lacks its constant {name!r}, which {CONSTANTS} should have")
        own = here is not None or at < len(devices) + len(totals) + len(epilogue)  # other replicas hold copies
        for path in kind.states if move and own else ():
            if path in stay:
                continue
            if path not in sources[at]:
                move_to(tensors[path], device)
            elif here is not None:  # in one process, a tensor whose parts are on several devices stays where it is
                move_to(tensors[sources[at][path]], device)
        stages.append(kind(tensors, held, device, submodules))
    whole = stages.pop(len(devices)) if totals else None
    return stages, whole, stages.pop(len(devices)) if epilogue else None


def _whole(model: nn.Module, path: str, kind: type[Stage]) -> Opaque:
    """What a stage calls whole, of this model."""
    found = {(frozenset(without), frozenset(joined)) for at, without, joined in kind.lists if at == path}
    if len(found) > 1:
        raise PackageError(f"{path} returns other lists from call to call, of which a saved package knows nothing")
    lists = found.pop() if found else ((), ())
    uses = dict(kind.uses).get(path)
    if uses is None:
        return Opaque(path, _submodule(model, path), lists=lists)
    owner, _, method = path.rpartition(".")
    return Opaque(owner, _submodule(model, owner), method=method, uses=frozenset(uses), lists=lists)


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise PackageError(f"the package calls {path}, which this {type(model).__name__} does not have") from None


def worker_device(label: str) -> torch.device:
    """The torch device of a worker: `cpu:0` and `cpu:1` are two workers on the one CPU."""
    return torch.device(torch_device(label))


def _check_device(stage: int, device: torch.device) -> None:
    if not is_here(device):
        found, kind = count(device.type), device.type.upper()
        there = f"no {kind} device" if found == 0 else f"{found} {kind} device{'s' if found > 1 else ''}"
        raise PlanError(f"stage {stage} is planned on {device}, and this machine has {there}")


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module, by path."""
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return dict(parameters) | dict(buffers)


def _tensors(
    module: ModuleType, model: nn.Module, others: Mapping[str, Tensor], used: Collection[str]
) -> dict[str, Tensor]:
    """The model's tensors by key. Raises PackageError if they do not fit the package, or a used one has no values."""
    found = tensors_of(model) | dict(others)
    rows = ((key in used, (found.get(key), key, *rest)) for key, *rest in module.TENSORS)
    faults = [fault for needed, row in rows if (fault := _misfit(needed, *row)) is not None]
    if faults:
        more = [f"and {len(faults) - 10} more"] if len(faults) > 10 else []
        lines = "".join(f"\n  {fault}" for fault in [*faults[:10], *more])
        raise PackageError(f"the package was made for {module.MODEL}; this {type(model).__name__} does not fit:{lines}")
    return found


def _misfit(used: bool, tensor: Tensor | None, key: str, shape: tuple[int, ...], dtype: str) -> str | None:
    if tensor is None:
        return f"{key}: missing"
    if tensor.is_meta and used:
        return f"{key}: has no values, it is on the meta device; call pipe.materialize(), or fxpipe.materialize(model)"
    here = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return None if here == (shape, dtype) else f"{key}: {here[1]}{list(here[0])}, expected {dtype}{list(shape)}"


def _load_constants(module: ModuleType) -> dict[str, Any]:
    path = Path(next(iter(module.__path__))) / CONSTANTS
    try:
        loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}
    except Exception as error:  # what torch raises for files that are none is not told
        raise PackageError(f"{path} cannot be read: {type(error).__name__}; save the package anew") from error
    if not isinstance(loaded, dict):
        raise PackageError(f"{path} holds a {type(loaded).__name__}, no tensors by name; save the package anew")
    return loaded
