"""Ops that are equal to one that ran before: the same function, on arguments of the same types in the same relations.

A deep model has the same ops again in each layer. Whether such an op writes, whether it is random, and what it makes is
known from the first of them; and Dynamo has made a value for each. That value stands for a run of the op only if it is
what the run would give: a tensor with the same sizes, strides and gradient, in memory of its own, or in that of the
same argument. An op that writes is never left out.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxpipe.ir.graph.graph import Region

# Where the functions are that depend on their arguments alone. Others, such as a custom op's, run each time.
HOMES = (torch, torch.nn.functional, torch.special, torch.linalg, torch.fft, operator)
LITERALS = (bool, int, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class Known:
    """What is known from the run of an op: the description of its value, and whether it is random."""

    value: Hashable
    random: bool


@dataclass
class EqualOps:
    """The ops of a graph that have run, and the values that nodes have by now.

    - `known`: what is known of ops, by what they have in common.
    - `objects`: the ids of the tensors that nodes have; `storages`: their memory.
    """

    mode: FakeTensorMode
    known: dict[Hashable, Known] = field(default_factory=dict)
    objects: set[int] = field(default_factory=set)
    storages: set[int] = field(default_factory=set)

    def add(self, value: Any) -> None:
        """Note that a node has this value."""
        for tensor in _tensors(value):
            self.objects.add(id(tensor))
            if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                self.storages.add(_storage(tensor))

    def key(self, node: fx.Node, args: Any, kwargs: Any, regions: tuple[Region, ...]) -> Hashable | None:
        """What equal ops have in common; None if the op has to run."""
        if torch._C._functorch.peek_interpreter_stack() is not None or not _depends_on_arguments(node):
            return None
        try:
            given = self._frozen((args, kwargs))
        except _Unknown:
            return None
        storages = [_storage(tensor) for tensor in _tensors((args, kwargs))]
        shared = tuple(map(storages.index, storages))
        return node.op, node.target, given, shared, regions, torch.is_grad_enabled()

    def find(self, key: Hashable | None, node: fx.Node, args: Any, kwargs: Any) -> Known | None:
        """What is known of the op, if Dynamo's value for it is what a run would give."""
        known = None if key is None else self.known.get(key)
        return known if known is not None and self._made(node, args, kwargs) == known.value else None

    def learn(self, key: Hashable | None, node: fx.Node, args: Any, kwargs: Any, value: Any, random: bool) -> Any:
        """Remember an op that has run and has written nothing. Returns Dynamo's value for it if it is equal, so that
        the views of it in later ops are also Dynamo's; else `value`."""
        if key is None:
            return value
        described = self._described(value, args, kwargs)
        if described is None:
            return value
        self.known[key] = Known(described, random)
        return node.meta["example_value"] if self._made(node, args, kwargs) == described else value

    def _made(self, node: fx.Node, args: Any, kwargs: Any) -> Hashable | None:
        return self._described(node.meta.get("example_value"), args, kwargs)

    def _described(self, value: Any, args: Any, kwargs: Any) -> Hashable | None:
        """A tensor, or a tuple or list of tensors, by its types and where its memory is from: an argument, or new. None
        if it is something else."""
        given = list(_tensors((args, kwargs)))
        objects, storages = [id(tensor) for tensor in given], [_storage(tensor) for tensor in given]
        own: list[int] = []
        found: list[Hashable] = []
        for item in value if isinstance(value, (tuple, list)) else (value,):
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
            elif address in self.storages or _sized_by_data(item):
                return None
            else:
                own.append(address)
                place = ("new", own.index(address))
            found.append((place, kind))
        return type(value) if isinstance(value, (tuple, list)) else None, tuple(found)

    def _frozen(self, item: Any) -> Hashable:
        """An argument, with the types of its tensors instead of them. Raises _Unknown."""
        if isinstance(item, Tensor):
            return self._kind(item)
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

    def _kind(self, tensor: Tensor) -> Hashable:
        """All that decides what an op makes of a tensor. Raises _Unknown if it is not a plain fake tensor."""
        plain = type(tensor) is FakeTensor and tensor.fake_mode is self.mode and tensor.layout == torch.strided
        if not plain or tensor.constant is not None:  # type: ignore[attr-defined]
            raise _Unknown
        try:
            flags = tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
        except RuntimeError:  # a view made without gradients, of memory that was then written with them
            raise _Unknown from None
        numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
        return tensor.dtype, tensor.device, tensor.dim(), tuple(map(_size, numbers)), flags


class _Unknown(Exception):
    """An argument or a value that is not compared."""


def _depends_on_arguments(node: fx.Node) -> bool:
    """Whether the function of an op is known to depend on its arguments only."""
    if node.op == "call_method":
        return True
    name = getattr(node.target, "__name__", "")
    return any(getattr(home, name, None) is node.target for home in HOMES)


def _size(size: Any) -> Hashable:
    """A number, or the expression of a symbolic one. Raises _Unknown if it is neither."""
    if type(size) is int:
        return size
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) or not hasattr(size.node, "expr"):
        raise _Unknown
    return type(size), size.node.expr


def _sized_by_data(tensor: Tensor) -> bool:
    """Whether a size of the tensor depends on the values of another."""
    return bool(free_unbacked_symbols(tensor))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a nest."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, slice):
        yield from _tensors((value.start, value.stop, value.step))
