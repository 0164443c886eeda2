"""The state of an optimizer, by the keys of the model's parameters.

`optimizer.state_dict()` numbers parameters in the order in which the optimizer got them, so the numbers differ between
processes with different stages. Here state is saved under the key of its parameter, which is the same everywhere.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from fxpipe.errors import CheckpointError
from fxpipe.pipe.drop_in_module import NothingToTrain

NUMBER = ".number"  # marks a number that is no tensor
Names = Mapping[int, str]
State = dict[str, Any]


def names_of(model: nn.Module) -> dict[int, str]:
    """The key of each parameter, by `id`; for tied weights the first key."""
    return {id(parameter): key for key, parameter in model.named_parameters()}


def name_of(parameter: Tensor, names: Names) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"the optimizer has a parameter of shape {list(parameter.shape)} that the model does not have; make it "
            "from pipe.parameters(), after pipe.materialize(...)"
        )
    return names[id(parameter)]


def is_nothing(parameter: Tensor) -> bool:
    """Whether it stands for the parameters of a rank that has none to train."""
    return isinstance(parameter, NothingToTrain)


def own_part(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that has the state on this rank: itself, or what a ZeroRedundancyOptimizer has for its part of the
    parameters."""
    module: Any = sys.modules.get("torch.distributed.optim")  # whoever has such an optimizer has imported it, for 2 s
    return optimizer.optim if module and isinstance(optimizer, module.ZeroRedundancyOptimizer) else optimizer


# Saving ---------------------------------------------------------------------------------------------------------------


def kept(optimizer: torch.optim.Optimizer, names: Names, mine: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's state for the parameters whose keys are in `mine`, by keys as `layers.0.weight.exp_avg`. Raises
    CheckpointError for state that is neither tensor nor number."""
    part = own_part(optimizer)
    if part is not optimizer:  # no other rank has state for these parameters
        optimizer, mine = part, names.values()
    states = ((name_of(parameter, names), state) for parameter, state in optimizer.state.items())
    for path, state in [(path, state) for path, state in states if path in mine]:
        for name, value in state.items():
            key = f"{path}.{name}"
            if isinstance(value, Tensor):
                yield key, value.detach()
            elif isinstance(value, (int, float)):
                yield key + NUMBER, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
            elif value is not None:
                raise CheckpointError(f"the optimizer keeps a {type(value).__name__} as {key}: no tensor, no number")


def groups_of(optimizer: torch.optim.Optimizer, names: Names) -> list[State]:
    """The optimizer's groups, with keys for the parameters and numbers for tensors."""
    return [
        {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()}
        | {"params": [name_of(parameter, names) for parameter in group["params"] if not is_nothing(parameter)]}
        for group in optimizer.param_groups
    ]


# Loading --------------------------------------------------------------------------------------------------------------


def find_state(
    path: Path,
    optimizer: torch.optim.Optimizer,
    names: Names,
    groups: Sequence[State],
    held: Mapping[str, TensorStorageMetadata],
) -> tuple[Callable[[], State], dict[str, Tensor]]:
    """A function that returns the argument for the optimizer's `load_state_dict`, and the tensors, by key, that must be
    read before it is called. `groups` and `held` are what was saved. Raises CheckpointError if they are for other
    parameters."""
    saved = {key: group for group in groups for key in group["params"]}
    of: dict[str, list[str]] = defaultdict(list)
    for key in held:
        of[key.removesuffix(NUMBER).rpartition(".")[0]].append(key)
    own = {id(parameter) for group in own_part(optimizer).param_groups for parameter in group["params"]}
    known: list[State] = []
    states: dict[int, dict[str, str]] = {}
    wanted: dict[str, Tensor] = {}
    numbers = itertools.count()
    for group in optimizer.param_groups:
        parameters = {next(numbers): parameter for parameter in group["params"]}
        keys = {
            number: name_of(parameter, names) for number, parameter in parameters.items() if not is_nothing(parameter)
        }
        known.append(hyperparameters(path, group, list(keys.values()), saved) | {"params": list(parameters)})
        for number, key in keys.items():
            if not parameters[number].is_meta and of[key] and id(parameters[number]) in own:
                wanted |= {full: like(held[full], parameters[number]) for full in of[key]}
                states[number] = {full.removesuffix(NUMBER).rpartition(".")[2]: full for full in of[key]}

    def value(full: str) -> Any:
        return wanted[full].item() if full.endswith(NUMBER) else wanted[full]

    def found() -> State:
        filled = {at: {name: value(full) for name, full in state.items()} for at, state in states.items()}
        return {"param_groups": known, "state": filled}

    return found, wanted


def like(entry: TensorStorageMetadata, parameter: Tensor) -> Tensor:
    """An empty tensor to read an entry into: like the parameter (device, distribution) if it has the same shape."""
    if entry.size == parameter.shape:
        return torch.empty_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def hyperparameters(path: Path, group: State, keys: Sequence[str], saved: Mapping[str, State]) -> State:
    """The saved hyperparameters of the group with the parameters `keys`, with the types that `group` has now. Raises
    CheckpointError if none were saved, or if they differ between the parameters."""
    missing = [key for key in keys if key not in saved]
    if missing:
        raise CheckpointError(f"{path} has nothing of an optimizer for {', '.join(missing[:3])}")
    odd = next((key for key in keys if unlike(saved[key], saved[keys[0]])), None)
    if odd is not None:
        raise CheckpointError(
            f"{path} has other hyperparameters for {odd} than for {keys[0]}, and they are in one group of the optimizer"
        )
    mine = saved[keys[0]] if keys else {}
    return {name: typed(mine.get(name, value), value) for name, value in group.items() if name != "params"}


def unlike(left: State, right: State) -> bool:
    """Whether two groups differ in more than their parameters."""
    return {**left, "params": None} != {**right, "params": None}


def typed(saved: Any, now: Any) -> Any:
    """A saved JSON value, converted to the type of the value `now`: tensor or tuple."""
    if isinstance(now, Tensor):
        return torch.full_like(now, float(saved))
    return tuple(saved) if isinstance(saved, list) and isinstance(now, tuple) else saved
