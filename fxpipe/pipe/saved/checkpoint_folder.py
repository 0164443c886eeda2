"""A folder of torch.distributed.checkpoint, which is read without running code from it.

torch's own reader of such a folder unpickles its table of contents, which can run any code, and opens any file that the
table names. Our reader only accepts the classes that such a table is made of, keeps these classes as they are, and
opens only files in the folder.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from fxpipe.errors import CheckpointError


class Writing(Protocol):
    """A folder that a thread of this process is writing. `complete` returns when all of it is there."""

    path: Path

    def complete(self) -> None: ...


being_written: WeakSet[Writing] = WeakSet()


def writing(path: Path) -> list[Writing]:
    """Those of this folder."""
    return [one for one in list(being_written) if one.path.resolve() == path.resolve()]


def entries(path: Path) -> dict[str, TensorStorageMetadata]:
    """The tensors in a folder of torch.distributed.checkpoint, by key. Other entries are pickled, and are not read.
    Waits for the folder if this process is writing it. Raises CheckpointError if it is no such folder, or stays
    incomplete."""
    for one in writing(path):
        one.complete()
    try:
        held = Reader(path).read_metadata().state_dict_metadata
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no folder of torch.distributed.checkpoint: {error}") from None
    return {key: entry for key, entry in held.items() if isinstance(entry, TensorStorageMetadata)}


def read(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy the values of these keys in a folder into the given tensors. Each process reads only what it needs."""
    if tensors:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load({key: x.detach() for key, x in tensors.items()}, storage_reader=Reader(path), no_dist=True)


class Reader(FileSystemReader):
    """torch's reader of a folder. It unpickles the table of contents safely and opens no file outside of the folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self.fs.concat_path(self.path, ".metadata"), "rb") as file:
            with unchanged():
                metadata: Metadata = Contents(file).load()
        for place in metadata.storage_data.values():
            file_name = PurePath(place.relative_path)
            if file_name.is_absolute() or ".." in file_name.parts:
                raise pickle.UnpicklingError(f"its .metadata names {file_name}, which is not in the folder")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


KNOWN = {
    "torch": {"Size", "device"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


LAYOUTS = {str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)}


class Contents(pickle.Unpickler):
    """Unpickles a table of contents. Raises UnpicklingError for any class that is not in KNOWN."""

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # so Python 3.13 calls it, and no other one
        if name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"its .metadata asks for {module}.{name}, which no table of contents needs")
        if name == "_get_layout":
            return LAYOUTS.__getitem__  # without attributes that a pickle could set
        return super().find_class(module, name)


@contextmanager
def unchanged() -> Iterator[None]:
    """Undo changes of the classes in KNOWN, which a pickle can give other attributes. Raises UnpicklingError if there
    were any."""
    found = (getattr(import_module(module), name, None) for module, names in KNOWN.items() for name in names)
    before = {known: dict(vars(known)) for known in found if isinstance(known, type)}
    try:
        yield
    finally:
        changed = [known for known, was in before.items() if not _same(vars(known), was)]
        for known in changed:
            for name in vars(known).keys() - before[known].keys():
                type.__delattr__(known, name)
            for name, value in before[known].items():
                if vars(known).get(name) is not value:
                    type.__setattr__(known, name, value)
    if changed:
        raise pickle.UnpicklingError(f"its .metadata changes the class {changed[0].__name__}")


def _same(now: Mapping[str, Any], was: Mapping[str, Any]) -> bool:
    return now.keys() == was.keys() and all(now[name] is was[name] for name in was)
