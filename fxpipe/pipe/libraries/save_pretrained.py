"""`save_pretrained` of transformers over ranks: each rank writes its own tensors, and nothing is gathered.

    rank 0   its tensors ─▶ model-00001-of-00003.safetensors   config.json, model.safetensors.index.json
    rank 1   its tensors ─▶ model-00002-of-00003.safetensors, model-00003-of-00003.safetensors

Each rank lets transformers write its part into a folder of its own, so the form is that of transformers, names that it
changes on the way included. Then the files get numbers, and rank 0 writes the index.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fxpipe.errors import CheckpointError, FxpipeError

from .model_in_other_class import with_methods

INDEX = "model.safetensors.index.json"
OF_MODEL = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX))
TAKEN = ("save_original_format",)  # options of transformers besides


class Shard(NamedTuple):
    """A file that one rank has written: its path, the keys of its tensors, and their bytes."""

    path: Path
    keys: tuple[str, ...]
    bytes: int


def save_pretrained(
    pipe: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    *args: Any,
    max_shard_size: int | str = "50GB",
    **options: Any,
) -> None:
    """As `save_pretrained` of the model. Over ranks all call it, the folder is that of rank 0, which all must see, and
    `is_main_process` is not needed. Raises FxpipeError for options that need the whole model in one process,
    CheckpointError if the ranks do not see each other's files; a failure on one rank is a RankError on the others."""
    folders = pipe.collect(str(save_directory), "save_pretrained")
    if len(folders) == 1:
        options |= {"max_shard_size": max_shard_size}
        pipe.model.save_pretrained(save_directory, is_main_process, *args, **options)
        return
    if args or (others := sorted(options.keys() - {*TAKEN})):
        raise FxpipeError(
            f"save_pretrained over ranks takes max_shard_size and {', '.join(TAKEN)}, not "
            f"{', '.join(others) if not args else 'more arguments by position'}"
        )
    folder, state = Path(folders[0]), pipe.state_dict()
    from torch.distributed.tensor import DTensor  # late: it takes sympy, which takes half a second

    if sharded := next((key for key, tensor in state.items() if isinstance(tensor, DTensor)), None):
        raise FxpipeError(f"{sharded} is shared out over ranks (ZeRO-3, parallelize): call fxpipe.save_checkpoint")
    own = folder / f"part-of-rank-{pipe.place}"

    def write() -> list[Shard]:
        shutil.rmtree(own, ignore_errors=True)
        each = with_methods(pipe.model, should_save_on_this_rank=lambda self, is_main_process: True)
        each.save_pretrained(own, state_dict=dict(state), max_shard_size=max_shard_size, **options)
        found = [shard(path) for path in sorted(own.glob("*.safetensors"))]
        if bool(state) != bool(found):
            raise CheckpointError(f"transformers has written no file for the {len(state)} tensors of this rank")
        return found

    every = together(pipe, write)
    shards = [one for some in every for one in some]
    names = numbered(len(shards))
    first = sum(len(some) for some in every[: pipe.place])

    def begin() -> None:
        if pipe.leads:
            for old in [path for path in folder.iterdir() if OF_MODEL.fullmatch(path.name)]:
                old.unlink()

    def move() -> None:
        for number, one in enumerate(every[pipe.place], first):
            one.path.rename(folder / names[number])
        for path in own.iterdir() if pipe.leads else ():
            if not OF_MODEL.fullmatch(path.name):
                path.replace(folder / path.name)
        shutil.rmtree(own)

    def end() -> None:
        if pipe.leads:
            finish(folder, shards, names, pipe.model.num_parameters())

    for part in (begin, move, end):
        together(pipe, part)


def together(pipe: Any, do: Callable[[], Any]) -> list[Any]:
    """What `do` returns on each rank. Raises what it raises here, and RankError if it failed elsewhere."""
    from fxpipe.pipe.ranks.rank_consistency import on_each  # late: this file is read in one process, too

    return on_each(lambda value: pipe.collect(value, "save_pretrained"), do)


def shard(path: Path) -> Shard:
    """A file of safetensors: a table in JSON after its length in 8 bytes, then the tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        keys = tuple(key for key in json.loads(file.read(length)) if key != "__metadata__")
    return Shard(path, keys, path.stat().st_size - 8 - length)


def numbered(count: int) -> list[str]:
    """The names of so many files of a model.

    >>> numbered(1), numbered(2)[1]
    (['model.safetensors'], 'model-00002-of-00002.safetensors')
    """
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def finish(folder: Path, shards: list[Shard], names: list[str], parameters: int) -> None:
    """Write the index, if there are several files. Raises CheckpointError if a file is not there, or a key twice."""
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(f"{missing[0]} is not in {folder} as rank 0 sees it: all ranks need one file system")
    places: dict[str, str] = {}
    for one, name in zip(shards, names, strict=True):
        for key in one.keys:
            if places.setdefault(key, name) != name:
                raise CheckpointError(f"{key} is in {places[key]} and in {name}")
    if len(names) > 1:
        about = {"total_parameters": parameters, "total_size": sum(one.bytes for one in shards)}
        text = json.dumps({"metadata": about, "weight_map": places}, indent=2, sort_keys=True)
        (folder / INDEX).write_text(f"{text}\n", encoding="utf-8")
