"""Readers of checkpoints in four forms, which never run code from a file.

a file with a state_dict         torch.load with weights_only, mapped into memory: only requested tensors are read
a .safetensors file              the same, by the library safetensors
shards                           files of these two kinds and an index in JSON, which says where each tensor is; also a
                                 folder with such an index or one such file, as models of Hugging Face are kept
a torch.distributed.checkpoint   a folder; a tensor may be in pieces, in the files of many ranks
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePath

import torch
from torch import Tensor

from fxpipe.errors import CheckpointError

MODEL = "model."  # the prefix of a model's keys in a folder that also has other things
INDEX = ".index.json"
USUAL = ("model.safetensors.index.json", "model.safetensors")  # what Hugging Face calls them, the first preferred
OLDER = ("pytorch_model.bin.index.json", "pytorch_model.bin")


@dataclass(frozen=True)
class Source:
    """A checkpoint to read: the keys of its tensors, and the shape of each. `fill` takes tensors by key and copies the
    values into them."""

    name: str
    keys: Collection[str]
    shape: Callable[[str], tuple[int, ...]]
    fill: Callable[[Mapping[str, Tensor]], None]


def open_source(path: str | Path) -> Source:
    """The checkpoint at `path`. Raises CheckpointError if it is none of the forms."""
    path = Path(path)
    if path.is_dir():
        file = None if (path / ".metadata").exists() else main_file(path)
        return within(open_folder(path), MODEL) if file is None else open_file(file)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    return open_file(path)


def main_file(folder: Path) -> Path | None:
    """The file or index that has the tensors in a folder of Hugging Face; None if there is none. Raises CheckpointError
    if several could be meant."""
    named = [folder / name for name in (*USUAL, *OLDER) if (folder / name).is_file()]
    others = sorted(folder.glob(f"*.safetensors{INDEX}")) or sorted(folder.glob("*.safetensors"))
    if not named and len(others) > 1:
        names = ", ".join(file.name for file in others[:5])
        raise CheckpointError(f"{folder} has several files with tensors, {names}, and no {USUAL[0]}: name one of them")
    return next(iter(named or others), None)


def open_file(path: Path) -> Source:
    """One file: an index, a .safetensors file, or one of torch.save."""
    if path.name.endswith(INDEX):
        return open_index(path)
    return open_safetensors(path) if path.suffix == ".safetensors" else open_saved(path)


def open_index(path: Path) -> Source:
    """Shards, by the index that says in which file beside it each tensor is. A shard is opened when one of its tensors
    is asked for. Raises CheckpointError if this is no such index."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        places = dict(held["weight_map"])
        shards = {Path(file) for file in places.values()}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no index of shards, which has a weight_map of file names by key: {error}"
        ) from None
    for file in map(PurePath, shards):
        if file.is_absolute() or ".." in file.parts:
            raise CheckpointError(f"{path} names {file}, which is not in its folder")

    @cache
    def shard(name: str) -> Source:
        file = path.parent / name
        if not file.is_file() or name.endswith(INDEX):
            raise CheckpointError(f"{path} names {name}, which is {'an index' if file.is_file() else 'not there'}")
        return open_file(file)

    def shape(key: str) -> tuple[int, ...]:
        source = shard(places[key])
        if key not in source.keys:
            raise CheckpointError(f"{source.name} lacks {key}, which {path.name} says is there")
        return source.shape(key)

    def fill(tensors: Mapping[str, Tensor]) -> None:
        for name in dict.fromkeys(places[key] for key in tensors):
            shard(name).fill({key: tensor for key, tensor in tensors.items() if places[key] == name})

    return Source(str(path), places.keys(), shape, fill)


def open_saved(path: Path) -> Source:
    """A file that `torch.save(model.state_dict(), path)` wrote. Raises CheckpointError for another file."""
    try:
        held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, ValueError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{path} is no file of torch.save that holds tensors alone: {error}") from None
    if not isinstance(held, Mapping) or not all(isinstance(tensor, Tensor) for tensor in held.values()):
        names = ", ".join(map(repr, list(held)[:5])) if isinstance(held, Mapping) else type(held).__name__
        raise CheckpointError(f"{path} is not a state_dict, tensors by key ({names}); save model.state_dict() itself")
    return Source(str(path), held.keys(), lambda key: tuple(held[key].shape), partial(copy_from, held.__getitem__))


def open_safetensors(path: Path) -> Source:
    """A file of the safetensors library, which must be installed. Raises CheckpointError for another file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CheckpointError(f"to read {path}, pip install 'fxpipe[hf]'") from None
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no file of safetensors: {error}") from None
    keys = frozenset(file.keys())
    return Source(
        str(path), keys, lambda key: tuple(file.get_slice(key).get_shape()), partial(copy_from, file.get_tensor)
    )


def copy_from(get: Callable[[str], Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy `get(key)` into the tensor of each key."""
    with torch.no_grad():
        for key, tensor in tensors.items():
            tensor.copy_(get(key))


def open_folder(path: Path) -> Source:
    """A folder of torch.distributed.checkpoint."""
    from .checkpoint_folder import entries, read  # late: torch.distributed.checkpoint takes half a second

    held = entries(path)
    return Source(str(path), held.keys(), lambda key: tuple(held[key].size), partial(read, path))


def within(source: Source, prefix: str) -> Source:
    """The source, where keys that begin with `prefix` also work without it: a folder may hold only a model, or a model
    and other things."""
    stripped = {key.removeprefix(prefix): key for key in source.keys if key.startswith(prefix)}
    return renamed(source, dict(zip(source.keys, source.keys, strict=True)) | stripped)


def based(source: Source, keys: Iterable[str], prefix: str) -> Source:
    """The source by the `keys` of a model. A model with a head has its base model's keys with a prefix, and either may
    be made from the other's checkpoint: a key that the source lacks is looked for without the prefix, and with it."""
    names = {}
    for key in keys:
        ways = (key, key.removeprefix(f"{prefix}."), f"{prefix}.{key}")
        if (found := next((way for way in ways if way in source.keys), None)) is not None:
            names[key] = found
    return renamed(source, names)


def renamed(source: Source, names: Mapping[str, str]) -> Source:
    """The source by other keys: `names` has its own key for each."""

    def fill(tensors: Mapping[str, Tensor]) -> None:
        source.fill({names[key]: tensor for key, tensor in tensors.items()})

    return Source(source.name, names.keys(), lambda key: source.shape(names[key]), fill)
