"""Modules of a model that are equal, such as its layers: what one of them computes, the others compute with their own
tensors.

    h.0  Block                     h.1  Block
      .scale   0.5                   .scale   0.5           an equal number
      .config  an object             .config  the same object
      .layer   0                     .layer   1             another: equal for a forward that does not read it
      .fc      Linear                .fc      Linear        equal modules again
         .weight  f32[8, 8]             .weight  f32[8, 8]  tensors of one kind, each in its own layer only
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from .attribute_changes import PARTS
from .twin import GLOBAL_HOOKS, HOOKS, Twins
from .twin_copies import slots_of

FEWEST = 3  # so many modules are alike, or each is traced
LITERALS = (bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
MISSING = object()


@dataclass(frozen=True, eq=False)
class Pairs:
    """The parts of two modules, in pairs.

    - `modules`: the modules, themselves included.
    - `tensors`: for each tensor of the first one the other's, by the id of the first; a shared tensor stays as it is.
    - `own`: the ids of the tensors that only one of the two has.
    """

    modules: tuple[tuple[nn.Module, nn.Module], ...]
    tensors: Mapping[int, tuple[Tensor, Tensor]]
    own: frozenset[int]


@dataclass(frozen=True, eq=False)
class Reliance:
    """That a trace has one module stand for another one: what they must have in common as long as it is used. `reads`:
    the attributes that forward reads, by the id of the first one's module."""

    first: nn.Module
    other: nn.Module
    reads: Mapping[int, frozenset[str]]


class EqualModules:
    """The equal modules among twins.

    - `groups`: for each module of which there are at least three alike a number, by the id; those may be equal.
    - `relied`: what traces rely on.
    """

    def __init__(self) -> None:
        self.groups: dict[int, int] = {}
        self.relied: list[Reliance] = []
        self._twins: Twins | None = None
        self._news: object = None
        self._shape: object = None
        self._uses: Counter[int] = Counter()

    def renew(self, twins: Twins) -> bool:
        """Look at the twins again if something changed. Returns whether what traces rely on does not hold any more."""
        if self._news is twins.news and self._twins is twins:
            return False
        shape, self._shape = self._shape, twins.shape
        self._twins, self._news = twins, twins.news
        self._uses = Counter(id(slot.twin) for slot in twins.slots if slot.twin is not None)
        self.groups = {} if any(GLOBAL_HOOKS) else groups([module for _, module in twins.named()])
        return bool(self.relied) and (
            shape is not twins.shape or any(GLOBAL_HOOKS) or not all(map(self._holds, self.relied))
        )

    def pairs(self, first: nn.Module, other: nn.Module) -> Pairs | None:
        """The parts of two modules in pairs; None if they are not built alike, or share a tensor with others."""
        found = pairs(first, other)
        if found is None:
            return None
        for side in (0, 1):
            inside: Counter[int] = Counter()
            for pair in found.modules:
                inside.update(id(x) for x in _tensors(pair[side]) if id(x) in found.own)
            if any(self._uses[key] != count for key, count in inside.items()):
                return None
        return found

    def agree(self, found: Pairs, reads: Mapping[int, frozenset[str]]) -> bool:
        """Whether the attributes that forward reads are the same in both modules."""
        return all(
            self._same(first, other, name) for first, other in found.modules for name in reads.get(id(first), ())
        )

    def _same(self, first: nn.Module, other: nn.Module, name: str) -> bool:
        if name in PARTS or name in HOOKS:
            return True  # they are compared in `pairs`
        one, two = vars(first).get(name, MISSING), vars(other).get(name, MISSING)
        assert self._twins is not None
        if one is two:
            return self._twins.original(one) is one  # or it leads to modules, and so to which layer this is
        try:
            return literal(one) == literal(two)
        except TypeError:
            return False

    def _holds(self, reliance: Reliance) -> bool:
        found = self.pairs(reliance.first, reliance.other)
        return found is not None and self.agree(found, reliance.reads)


def literal(value: Any) -> Hashable:
    """A value that never changes, so that equal ones may stand for each other. Raises TypeError for others."""
    if type(value) in (tuple, frozenset, torch.Size):
        return type(value), tuple(map(literal, value))
    if type(value) in (float, complex):
        return type(value), repr(value)  # 0.0 == -0.0
    if type(value) in LITERALS or (isinstance(value, Enum) and not isinstance(value, (int, str))):
        return type(value), value
    raise TypeError


def groups(modules: list[nn.Module]) -> dict[int, int]:
    """A number for each module of which at least three are built alike, by the id of the module."""
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
    """How a module is built, without its submodules; None if no other stands for it."""
    held = vars(module)
    if "forward" in held or any(held.get(name) for name in HOOKS) or slots_of(type(module)):
        return None
    tensors = tuple((name, _kind(x)) for part in (module._parameters, module._buffers) for name, x in part.items())
    if any(kind is MISSING for _, kind in tensors):
        return None
    return type(module), frozenset(held), len(module._parameters), tensors


def _kind(tensor: Tensor | None) -> Hashable:
    """What Dynamo may know of a tensor; MISSING if there is more to it."""
    if tensor is None:
        return None
    added = any(not name.startswith("_dynamo_") for name in vars(tensor))  # Dynamo notes what it has seen
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or added:
        return MISSING
    flags = tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg()
    return type(tensor), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), flags


def pairs(first: nn.Module, other: nn.Module) -> Pairs | None:
    """The parts of two modules in pairs, wherever else they are used; None if they are not built alike."""
    modules: dict[int, tuple[nn.Module, nn.Module]] = {}
    tensors: dict[int, tuple[Tensor, Tensor]] = {}

    def pair(found: dict[int, Any], one: Any, two: Any) -> bool:
        return found.setdefault(id(one), (one, two))[1] is two

    def walk(one: nn.Module, two: nn.Module) -> bool:
        if id(one) in modules:
            return modules[id(one)][1] is two
        modules[id(one)] = one, two
        build = _build(one)
        if build is None or build != _build(two) or list(one._modules) != list(two._modules):
            return False
        for x, y in zip(_tensors(one), _tensors(two), strict=True):
            if not pair(tensors, x, y):
                return False
        for a, b in zip(one._modules.values(), two._modules.values(), strict=True):
            if (a is None) is not (b is None) or (a is not None and b is not None and not walk(a, b)):
                return False
        return True

    if first is other or not walk(first, other):
        return None
    for found in (modules, tensors):
        ones = {id(one) for one, two in found.values() if one is not two}
        twos = {id(two) for _, two in found.values()}
        if len(twos) != len(found) or not ones.isdisjoint(twos):
            return None
    own = frozenset(id(x) for one, two in tensors.values() if one is not two for x in (one, two))
    return Pairs(tuple(modules.values()), tensors, own)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return (x for part in (module._parameters, module._buffers) for x in part.values() if x is not None)
