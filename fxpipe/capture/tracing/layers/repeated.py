"""Which submodules are repeated: of modules that are built alike, as the layers of a model are, one may be traced for
all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from fxpipe.capture.twins.twin import HOOKS
from fxpipe.capture.twins.twin_copies import slots_of

FEWEST = 3  # so many modules are alike, or each is traced with the model
MISSING = object()


def repeated(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules, of a model in its order, that are repeated, and are in no other one that is."""
    found = _groups(modules)
    inside = {id(part) for module in modules if id(module) in found for part in module.modules() if part is not module}
    outer = [module for module in modules if id(module) in found and id(module) not in inside]
    often = Counter(found[id(module)] for module in outer)
    return [module for module in outer if often[found[id(module)]] >= FEWEST]


def _groups(modules: Sequence[nn.Module]) -> dict[int, int]:
    """A number for each module of which at least `FEWEST` are built alike, by the id of the module."""
    numbers: dict[Hashable, int] = {}
    of: dict[int, int] = {}

    def number(module: nn.Module) -> int:
        if id(module) not in of:
            of[id(module)] = -1  # it may hold itself
            parts = tuple((name, None if x is None else number(x)) for name, x in module._modules.items())
            key = (_build(module) or id(module), parts)
            of[id(module)] = numbers.setdefault(key, len(numbers))
        return of[id(module)]

    found = {id(module): number(module) for module in modules if _computes(module)}
    often = Counter(found.values())
    return {key: group for key, group in found.items() if often[group] >= FEWEST}


def _computes(module: nn.Module) -> bool:
    """Whether the forward of a module is worth a look: it is not a single operation of torch, nor a list."""
    is_torchs = type(module).__module__.startswith("torch.nn.") and not module._modules
    return not is_torchs and type(module).forward is not nn.Module.forward


def _build(module: nn.Module) -> Hashable | None:
    """How a module is built, without its submodules; None if there is more to it than Dynamo guards."""
    held = vars(module)
    if any(held.get(name) for name in HOOKS) or slots_of(type(module)):
        return None
    tensors = tuple((name, _kind(x)) for part in (module._parameters, module._buffers) for name, x in part.items())
    if any(kind is MISSING for _, kind in tensors):
        return None
    return type(module), frozenset(held) - {"forward"}, len(module._parameters), tensors


def _kind(tensor: Tensor | None) -> Hashable:
    """What Dynamo may know of a tensor; MISSING if there is more to it."""
    if tensor is None:
        return None
    added = any(not name.startswith("_dynamo_") for name in vars(tensor))  # Dynamo notes what it has seen
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or added:
        return MISSING
    flags = tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg()
    return type(tensor), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), flags
