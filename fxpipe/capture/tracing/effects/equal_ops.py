"""Ops that are equal to one that ran before: the same function, on arguments of the same types in the same relations.

A deep model has the same ops again in each layer. Whether such an op writes, whether it is random, and what it makes is
known from the first of them. So only the first one runs. What the others make is not made: their values stand for
tensors with the same sizes, strides and gradient, in memory of their own, or in that of the same argument. They are
made where an op that has to run needs them, or others in the same memory. An op that writes is never left out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx

from fxpipe.capture.tracing.unmade_tensors import Kind, Memory, Unmade, rebuilt, settled
from fxpipe.ir.graph.graph import Region
from fxpipe.torch_internals.compiling.dynamic_sizes import depends_on_data
from fxpipe.torch_internals.compiling.vmap_levels import in_vmap, outside_of_vmaps, vmap_is_entered
from fxpipe.torch_internals.tensor_memory import memory_key
from fxpipe.torch_internals.tracing.tensors_without_memory import FakeTensor, FakeTensorMode

# Where the functions are that depend on their arguments alone. Others, such as a custom op's, run each time.
HOMES = (torch, torch.nn.functional, torch.special, torch.linalg, torch.fft, operator)
LITERALS = (bool, int, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
SYMBOLIC = (torch.SymBool, torch.SymInt, torch.SymFloat)
NUMBERS = (bool, int, float, *SYMBOLIC)


@dataclass
class Known:
    """What is known from the run of an op.

    - `items`: its tensors, with where their memory is from: ("argument" or "view", the place of the argument), or
      ("new", 0).
    - `nest`: the type of what has the tensors; None if it is a tensor.
    - `number`: what it made if that is a number, or the sizes of a tensor.
    - `sure`: whether tensors of these kinds can be made without the op.
    """

    items: tuple[tuple[tuple[str, int], Kind], ...]
    nest: type | None
    random: bool
    number: Any = None
    sure: bool | None = None


@dataclass
class EqualOps:
    """The ops of a graph that have run, and the values that nodes have by now.

    - `run`: runs an op on tensors.
    - `known`: what is known of ops, by what they have in common.
    - `objects`: the ids of the tensors that nodes have; `storages`: their memory.
    - `memories`: the memory of tensors that are not made, by its address.
    - `kinds`: all kinds; `kind_of`: those of tensors since the last run of an op, by their ids.
    """

    mode: FakeTensorMode
    run: Callable[[fx.Node, Any, Any], Any]
    known: dict[Hashable, Known] = field(default_factory=dict)
    objects: set[int] = field(default_factory=set)
    storages: set[int] = field(default_factory=set)
    memories: dict[int, Memory] = field(default_factory=dict)
    kinds: dict[Hashable, Kind] = field(default_factory=dict)
    kind_of: dict[int, Kind] = field(default_factory=dict)
    _news: Iterator[int] = field(default_factory=lambda: count(-1, -1))

    def add(self, value: Any) -> None:
        """Note that a node has this value."""
        for tensor in tensors_in(value):
            if isinstance(tensor, Tensor):
                self.objects.add(id(tensor))
                if not in_vmap(tensor):
                    self.storages.add(_storage(tensor))

    def key(self, node: fx.Node, args: Any, kwargs: Any, regions: tuple[Region, ...]) -> Hashable | None:
        """What equal ops have in common; None if the op has to run."""
        if vmap_is_entered() or not depends_on_arguments(node):
            return None
        try:
            given = self._frozen((args, kwargs))
        except _Unknown:
            return None
        storages = [_storage(tensor) for tensor in tensors_in((args, kwargs))]
        shared = tuple(map(storages.index, storages))
        return node.op, node.target, given, shared, regions, torch.is_grad_enabled()

    def find(self, key: Hashable | None) -> Known | None:
        """What is known of the op."""
        known = None if key is None else self.known.get(key)
        if known is not None and known.sure is None:
            known.sure = all(place != "new" or self._can_be_made(kind) for (place, _), kind in known.items)
        return known if known is not None and known.sure else None

    def value(self, known: Known, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """What the op makes, unmade."""
        if known.number is not None:
            return known.number
        given, grad = list(tensors_in((args, kwargs))), torch.is_grad_enabled()
        items: list[Any] = []
        for index, ((place, argument), kind) in enumerate(known.items):
            if place == "argument":
                items.append(given[argument])
                continue
            if place == "new":
                memory, make = Memory(next(self._news)), kind.like
            else:
                memory = self._memory(given[argument])
                make = partial(self._again, node, args, kwargs, index, grad)
            items.append(Unmade(kind, memory, make))
            memory.waiting.append(items[-1])
        return items[0] if known.nest is None else rebuilt(known.nest, items)

    def unmade(self, alike: Any, make: Callable[[], Any]) -> Any:
        """What `make` makes, in memory of its own, of the kind of another tensor; unmade if that has a kind."""
        try:
            unmade = Unmade(self._kind(alike), Memory(next(self._news)), make)
        except _Unknown:
            return make()
        unmade.memory.waiting.append(unmade)
        return unmade

    def as_made(self, value: Any, tensor: Tensor | None) -> Any:
        """The tensor, which Dynamo has made to stand for an unmade value, if it is of the same kind; else the value."""
        if tensor is None or not isinstance(value, Unmade) or value.memory.address >= 0 or id(tensor) in self.objects:
            return value
        try:
            return tensor if self._kind(tensor) is value.kind else value
        except _Unknown:
            return value

    def made(self, value: Any) -> Any:
        """The value with all tensors in it made, and all others in their memory."""
        for tensor in tensors_in(value):
            memory = tensor.memory if isinstance(tensor, Unmade) else self.memories.get(_address(tensor))
            if memory is not None and memory.waiting:
                with outside_of_vmaps():
                    self._make(memory)
        return _changed(value)

    def unchanged(self, key: Hashable | None, node: fx.Node, args: Any, kwargs: Any, regions: Any) -> bool:
        """Whether an op, which has just run, has left its arguments of the same kinds."""
        self.kind_of.clear()
        return key is not None and self.key(node, args, kwargs, regions) == key

    def remember(self, key: Hashable | None, args: Any, kwargs: Any, value: Any, random: bool) -> None:
        """Remember what an op made of these arguments; it has written nothing."""
        if key is None:
            return
        if isinstance(value, NUMBERS) or type(value) is torch.Size:
            numbers = value if isinstance(value, tuple) else (value,)
            # Of a tensor's kind only sizes and properties are known; a float is one of its elements.
            element = isinstance(value, (float, torch.SymFloat)) and next(tensors_in((args, kwargs)), None) is not None
            if not element and not any(isinstance(one, SYMBOLIC) and depends_on_data(one) for one in numbers):
                self.known[key] = Known((), None, random, value)
            return
        found = self._described(value, args, kwargs)
        if found is not None:
            self.known[key] = Known(found, type(value) if isinstance(value, (tuple, list)) else None, random)

    def _make(self, memory: Memory) -> None:
        """Make all tensors that wait in this memory."""
        while memory.waiting:
            unmade = memory.waiting.pop(0)
            unmade.tensor = unmade.make()
            self.add(unmade.tensor)
            if memory.address < 0:
                memory.address = _storage(unmade.tensor)
                self.memories[memory.address] = memory

    def _again(self, node: fx.Node, args: Any, kwargs: Any, index: int, grad: bool) -> Tensor:
        """The tensor at this place of what an op makes, by its run. Its argument in the same memory is made before."""
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, Unmade) and tensor.tensor is None:
                self._make(tensor.memory)
        with torch.set_grad_enabled(grad):
            value = self.run(node, *_changed((args, kwargs)))
        made: Tensor = value[index] if isinstance(value, (tuple, list)) else value
        return made

    def _memory(self, tensor: Any) -> Memory:
        if isinstance(tensor, Unmade):
            return tensor.memory
        address = _storage(tensor)
        return self.memories.setdefault(address, Memory(address))

    def _described(self, value: Any, args: Any, kwargs: Any) -> Any:
        """A tensor, or a tuple or list of tensors, by its kinds and where its memory is from: an argument, or new. None
        if it is something else."""
        given = list(tensors_in((args, kwargs)))
        objects, storages = [id(tensor) for tensor in given], [_storage(tensor) for tensor in given]
        own: set[int] = set()
        found: list[tuple[tuple[str, int], Kind]] = []
        nested = type(value) in (tuple, list) or type(value).__module__ == "torch.return_types"
        for item in value if nested else (value,):
            if not isinstance(item, Tensor):
                return None
            try:
                kind = self._kind(item)
            except _Unknown:
                return None
            address = _storage(item)
            if id(item) in objects:
                place = ("argument", objects.index(id(item)))
            elif id(item) in self.objects:
                return None
            elif address in storages:
                place = ("view", storages.index(address))
            elif address in self.storages or address in own or bool(depends_on_data(item)):
                return None
            else:
                own.add(address)
                place = ("new", 0)
            found.append((place, kind))
        return None if {"new", "view"} <= {place for (place, _), _ in found} else tuple(found)

    def _frozen(self, item: Any) -> Hashable:
        """An argument, with the kinds of its tensors instead of them. Raises _Unknown."""
        if isinstance(item, (Tensor, Unmade)):
            return Kind, self._kind(item).number
        if isinstance(item, (tuple, list)):
            return isinstance(item, tuple), tuple(map(self._frozen, item))
        if isinstance(item, dict):
            return tuple((key, self._frozen(value)) for key, value in item.items())
        if isinstance(item, slice):
            return slice, self._frozen((item.start, item.stop, item.step))
        if isinstance(item, (float, complex)):
            return type(item), repr(item)  # 0.0 == -0.0
        if isinstance(item, LITERALS):
            return type(item), item
        return _size(item)

    def _kind(self, tensor: Tensor | Unmade) -> Kind:
        """The kind of a tensor. Raises _Unknown if it is not a plain fake tensor."""
        if isinstance(tensor, Unmade):
            return tensor.kind
        if id(tensor) not in self.kind_of:
            self.kind_of[id(tensor)] = self._found(tensor)
        return self.kind_of[id(tensor)]

    def _found(self, tensor: Tensor) -> Kind:
        plain = type(tensor) is FakeTensor and tensor.fake_mode is self.mode and tensor.layout == torch.strided
        if not plain or tensor.constant is not None:  # type: ignore[attr-defined]
            raise _Unknown
        try:
            flags = tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
        except RuntimeError:  # a view made without gradients, of memory that was then written with them
            raise _Unknown from None
        parts = tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
        numbers = tuple(map(_size, (*parts[0], *parts[1], *parts[2:])))
        key = tensor.dtype, tensor.device, tensor.dim(), numbers, flags
        if key not in self.kinds:
            made = flags == (tensor.requires_grad, not tensor.requires_grad, False, False, False)
            self.kinds[key] = Kind(len(self.kinds), tensor.dtype, tensor.device, tensor.requires_grad, made, *parts)
        return self.kinds[key]

    def _can_be_made(self, kind: Kind) -> bool:
        """Whether `kind.like` makes a tensor of this kind: known at once for one without gaps, in the usual order."""
        length: Any = 1
        for size, stride in zip(reversed(kind.shape), reversed(kind.stride), strict=True):
            if _number(stride) != length:
                return self._found(kind.like()) is kind
            length = sympy.expand(length * _number(size))
        at_start = type(kind.offset) is int and kind.offset == 0
        usual = kind.made and at_start and _number(kind.bytes) == sympy.expand(length * kind.dtype.itemsize)
        return usual or self._found(kind.like()) is kind


class _Unknown(Exception):
    """An argument or a value that is not compared."""


def depends_on_arguments(node: fx.Node) -> bool:
    """Whether the function of an op is known to depend on its arguments only."""
    if node.op == "call_method":
        return True
    name = getattr(node.target, "__name__", "")
    return any(getattr(home, name, None) is node.target for home in HOMES)


def _size(size: Any) -> Hashable:
    """A number, or the expression of a symbolic one. Raises _Unknown if it is neither."""
    if type(size) is int:
        return size
    if not isinstance(size, SYMBOLIC) or not hasattr(size.node, "expr"):
        raise _Unknown
    expression = size.node.expr
    # torch writes the same size in several ways
    return type(size), expression if isinstance(size, torch.SymBool) else expression.expand()


def _number(size: Any) -> Any:
    """A number, or the expanded expression of a symbolic one."""
    return size if isinstance(size, int) else size.node.expr.expand()


def _storage(tensor: Tensor | Unmade) -> int:
    return tensor.memory.address if isinstance(tensor, Unmade) else memory_key(tensor)


def _address(tensor: Tensor) -> int:
    """The address of its memory; 0 inside a vmap, where none is known."""
    return 0 if in_vmap(tensor) else _storage(tensor)


def _changed(value: Any) -> Any:
    """A nest, with the tensors that have been made."""
    if isinstance(value, dict):
        return {key: _changed(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_changed(value.start), _changed(value.stop), _changed(value.step))
    if isinstance(value, (tuple, list)) and next(tensors_in(value), None) is not None:
        return rebuilt(type(value), [_changed(item) for item in value])
    return settled(value)


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors of a nest."""
    found: list[Any] = []
    _add_tensors(value, found)
    return iter(found)


def _add_tensors(value: Any, found: list[Any]) -> None:
    if type(value) in LITERALS or isinstance(value, SYMBOLIC):
        return
    if isinstance(value, (Tensor, Unmade)):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _add_tensors(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _add_tensors(item, found)
    elif isinstance(value, slice):
        _add_tensors((value.start, value.stop, value.step), found)
