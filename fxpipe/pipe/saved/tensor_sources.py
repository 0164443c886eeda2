"""Readers of checkpoints in three forms, which never run code from a file.

a file with a state_dict         torch.load with weights_only, mapped into memory: only requested tensors are read
a .safetensors file              the same, by the library safetensors
a torch.distributed.checkpoint   a folder; a tensor may be in pieces, in the files of many ranks
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError

MODEL = "model."  # the prefix of a model's keys in a folder that also has other things


@dataclass(frozen=True)
class Source:
    """A checkpoint to read: the shapes of its tensors by key. `fill` takes tensors by key and copies the values into
    them."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    fill: Callable[[Mapping[str, Tensor]], None]


def open_source(path: str | Path) -> Source:
    """The checkpoint at `path`. Raises CheckpointError if it is none of the forms."""
    path = Path(path)
    if path.is_dir():
        return within(open_folder(path), MODEL)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    return open_safetensors(path) if path.suffix == ".safetensors" else open_file(path)


def open_file(path: Path) -> Source:
    """A file that `torch.save(model.state_dict(), path)` wrote. Raises CheckpointError for another file."""
    try:
        held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{path} is no file of torch.save that holds tensors alone: {error}") from None
    if not isinstance(held, Mapping) or not all(isinstance(tensor, Tensor) for tensor in held.values()):
        names = ", ".join(map(repr, list(held)[:5])) if isinstance(held, Mapping) else type(held).__name__
        raise CheckpointError(f"{path} is not a state_dict, tensors by key ({names}); save model.state_dict() itself")
    fill = partial(copy_from, held.__getitem__)
    return Source(str(path), {key: tuple(tensor.shape) for key, tensor in held.items()}, fill)


def open_safetensors(path: Path) -> Source:
    """A file of the safetensors library, which must be installed."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise CheckpointError(f"to read {path}, pip install safetensors") from None
    file = safe_open(path, framework="pt")
    fill = partial(copy_from, file.get_tensor)
    return Source(str(path), {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}, fill)  # noqa: SIM118


def copy_from(get: Callable[[str], Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy `get(key)` into the tensor of each key."""
    with torch.no_grad():
        for key, tensor in tensors.items():
            tensor.copy_(get(key))


def open_folder(path: Path) -> Source:
    """A folder of torch.distributed.checkpoint."""
    from .checkpoint_folder import entries, read  # late: torch.distributed.checkpoint takes half a second

    held = entries(path)
    return Source(str(path), {key: tuple(entry.size) for key, entry in held.items()}, partial(read, path))


def within(source: Source, prefix: str) -> Source:
    """The source, where keys that begin with `prefix` also work without it: a folder may hold only a model, or a model
    and other things."""
    names = {key: key for key in source.shapes}
    names |= {key.removeprefix(prefix): key for key in source.shapes if key.startswith(prefix)}

    def fill(tensors: Mapping[str, Tensor]) -> None:
        source.fill({names[key]: tensor for key, tensor in tensors.items()})

    return Source(source.name, {name: source.shapes[key] for name, key in names.items()}, fill)
