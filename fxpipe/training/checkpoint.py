"""Checkpoints of a model, its optimizer and other values of a training loop, by the model's own keys.

torch.distributed.checkpoint writes and reads the tensors. This module defines their keys, so that the same folder fits
four stages, eight, or the plain model, and contains no code:

    model.<key>               a tensor of the model's state_dict()
    optim.<key>.exp_avg       optimizer state of the parameter of that key
    optim.<key>.step.number   optimizer state that is a number, not a tensor
    extra.<name>              a tensor that the user has added
    about.<rank>              JSON in bytes: the optimizer's groups, by keys of parameters, and the user's other extras

Every process writes what it has, and reads what it needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fxpipe.errors import CheckpointError
from fxpipe.ir.dataclass_json import from_plain, parse
from fxpipe.pipe.drop_in_module import DropInModule
from fxpipe.pipe.materialize import listed
from fxpipe.pipe.saved.checkpoint_folder import entries, read, writing
from fxpipe.runtime.interrupts import Interrupts, ignore

from .distributed_save import TABLE, OverRanks, Savers, Saving, draft, savers_of, write
from .optimizer_state import find_state, groups_of, kept, names_of

MODEL, OPTIM, EXTRA, ABOUT = "model.", "optim.", "extra.", "about."


@dataclass(frozen=True)
class About:
    """The JSON of one process: the groups of its optimizer, with keys of parameters under "params", and the user's
    extras that are not tensors."""

    groups: tuple[dict[str, Any], ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Parameters:
    """The part that every group of an optimizer has: the keys of its parameters."""

    params: tuple[str, ...]


def save_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **extra: Any
) -> None:
    """Write a pipe, or a plain model, with its optimizer into a folder, each tensor under the model's own key.

    With several processes, all of them call it, each with its own `optimizer` of `pipe.parameters()`, and each writes
    the tensors that it has. `extra` of the first process is saved too: tensors and JSON values, as in `step=100,
    schedule=scheduler.state_dict(), rng=torch.get_rng_state()`. A folder counts as a checkpoint only when it is
    complete; an incomplete one is written over. Raises CheckpointError if the folder already is one, or if a value is
    neither tensor nor JSON; a failure on one rank is a RankError on all others. After Ctrl-C, KeyboardInterrupt is
    raised when all is written; after a second Ctrl-C, at once.
    """
    settle(model)
    path, savers = Path(folder), savers_of(model)
    with Interrupts(ignore):  # torch's writer would raise another exception, or abort the process
        found = partial(contents, path, model, optimizer, extra, savers)
        write(draft(path, found, savers, copies=False), savers)


def async_save_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **extra: Any
) -> Saving:
    """As `save_checkpoint`, but training goes on while the files are written: returns once all values are copied to
    host memory, which must have room for them. Named after torch.distributed.checkpoint's `async_save`.

        saving = fxpipe.async_save_checkpoint("runs/100", pipe, optimizer, step=100)
        ...  # steps
        saving.wait()  # optional; if one rank calls it, all must

    The next `save_checkpoint` or `async_save_checkpoint` of the same model waits for it, and so does the end of the
    process. The folder counts as a checkpoint from the moment when all processes have written all of it. Raises as
    `save_checkpoint` does for values that cannot be saved; an error of writing is raised by `wait`, or by the next
    call that waits, on all ranks, or else printed at the end of the process.
    """
    settle(model)
    path, savers = Path(folder), savers_of(model)
    with Interrupts(ignore):
        found = partial(contents, path, model, optimizer, extra, savers)
        saving = _savings[model] = Saving(path, draft(path, found, savers, copies=True), savers)
    return saving


_savings: WeakKeyDictionary[nn.Module, Saving] = WeakKeyDictionary()  # the last one of each model


def settle(model: nn.Module) -> None:
    """Wait for the checkpoint of this model that is being written, if there is one."""
    saving = _savings.pop(model, None)
    if saving is not None:
        saving.wait()


def contents(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], savers: Savers
) -> dict[str, Tensor]:
    """What this process writes, by key. Raises CheckpointError, see `save_checkpoint`."""
    if (path / TABLE).exists():
        raise CheckpointError(f"{path} has a checkpoint already; choose another folder")
    if writing(path):
        raise CheckpointError(f"{path} is being written, by an async_save_checkpoint; choose another folder")
    tensors = {MODEL + key: value for key, value in model_tensors(model, savers.store is None).items()}
    about: dict[str, Any] = {}
    if optimizer is not None:
        names = names_of(unwrapped(model)) | names_of(model)
        mine = model.own_tensors().keys() if isinstance(model, OverRanks) else set(names.values())
        tensors |= {OPTIM + key: tensor for key, tensor in kept(optimizer, names, mine)}
        about["groups"] = groups_of(optimizer, names)
    if savers.leads:
        tensors |= {EXTRA + name: value.detach() for name, value in extra.items() if isinstance(value, Tensor)}
        about["extra"] = {name: value for name, value in extra.items() if not isinstance(value, Tensor)}
    return tensors | {f"{ABOUT}{savers.place}": to_bytes(about)}


def load_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load what `save_checkpoint` has written into a pipe or a plain model, and into its optimizer, with learning rates
    and other hyperparameters. It may have been saved from another number of stages and ranks. Returns the extras that
    were saved, by name.

    If an `async_save_checkpoint` of this process is still writing the folder, this waits, for other ranks at most the
    timeout of the pipe. No code in the folder is run. Tensors on the meta device are not read: call
    `materialize(checkpoint=folder)` first. Raises CheckpointError, and changes nothing, if folder and model do not fit,
    or if the folder is not complete.
    """
    path = Path(folder)
    held = entries(path)
    check_fit(path, unwrapped(model).state_dict(keep_vars=True), part(held, MODEL))
    about = abouts(path, held)
    own = {key: value for key, value in here(model).items() if not value.is_meta}
    found = None
    if optimizer is not None:
        groups = [group for one in about for group in one.groups]
        names = names_of(unwrapped(model)) | names_of(model)
        found, wanted = find_state(path, optimizer, names, groups, part(held, OPTIM))
        read(path, {OPTIM + key: tensor for key, tensor in wanted.items()})
    read(path, {MODEL + key: value for key, value in own.items()})
    if optimizer is not None and found is not None:
        optimizer.load_state_dict(found())
    extra = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in part(held, EXTRA).items()}
    read(path, {EXTRA + name: tensor for name, tensor in extra.items()})
    return {name: value for one in about for name, value in one.extra.items()} | extra


def last_checkpoint(folder: str | Path) -> Path | None:
    """Of the complete checkpoints among the subfolders of `folder`, the one that was completed last; None if there is
    none."""
    tables = sorted(Path(folder).glob(f"*/{TABLE}"), key=lambda table: table.stat().st_mtime_ns)
    return tables[-1].parent if tables else None


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's model, also from a pipe; a pipe may have only a part of it in this process."""
    return model.model if isinstance(model, DropInModule) else model


def here(model: nn.Module) -> Mapping[str, Tensor]:
    """The tensors of the state_dict that this process has, those that other processes have too included."""
    state: Mapping[str, Tensor] = unwrapped(model).state_dict(keep_vars=True)  # other ranks' have no values to detach
    held = model.held_tensors() if isinstance(model, OverRanks) else state
    return {key: held[key].detach() for key in state if key in held}


def model_tensors(model: nn.Module, alone: bool) -> dict[str, Tensor]:
    """The tensors of the state_dict with values here. Raises CheckpointError if a value is not a tensor, or if `alone`
    and a tensor is on the meta device."""
    state = model.state_dict()
    faults = [f"{key}: {type(value).__name__}" for key, value in state.items() if not isinstance(value, Tensor)]
    if not faults and alone:
        faults = [f"{key}: on the meta device" for key, value in state.items() if value.is_meta]
    if faults:
        raise CheckpointError(f"only tensors with values can be saved:{listed(faults)}")
    return {key: value.detach() for key, value in state.items() if not value.is_meta}


def part(held: Mapping[str, TensorStorageMetadata], prefix: str) -> dict[str, TensorStorageMetadata]:
    """The entries whose key begins with `prefix`, by the rest of the key."""
    return {key.removeprefix(prefix): entry for key, entry in held.items() if key.startswith(prefix)}


def check_fit(path: Path, state: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata]) -> None:
    """Raise CheckpointError unless the model's tensors are those in the folder."""
    faults = [f"{key}: missing" for key in state if key not in saved]
    faults += [f"{key}: the model has none" for key in saved if key not in state]
    for key, value in state.items():
        if key in saved and tuple(value.shape) != tuple(saved[key].size):
            faults.append(f"{key}: {list(saved[key].size)}, and the model has {list(value.shape)}")
    if faults:
        raise CheckpointError(f"{path} is a checkpoint of another model:{listed(faults)}")


def to_bytes(about: Mapping[str, Any]) -> Tensor:
    try:
        text = json.dumps(about)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"only tensors, and what JSON knows, can be saved: {error}") from None
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def abouts(path: Path, held: Mapping[str, TensorStorageMetadata]) -> list[About]:
    """The JSON of each process. Raises CheckpointError if it is damaged."""
    tensors = {ABOUT + rank: torch.empty(entry.size, dtype=torch.uint8) for rank, entry in part(held, ABOUT).items()}
    read(path, tensors)
    found = []
    for key, tensor in tensors.items():
        try:
            about = from_plain(About, parse(bytes(tensor.tolist()).decode(), finite=False))
            for group in about.groups:
                from_plain(Parameters, {"params": group.get("params")})
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: {key}: {error}") from None
        found.append(about)
    return found
