"""What a submodule that is kept whole returns, taken apart: its tensors and other leaves, and the lists around them.

    {"loss": f32[], "features": (f32[4, 8], f32[6, 8])}        a run with two samples
    {"loss": f32[], "features": (f32[6, 8], f32[4, 8], f32[4, 8])}    one with three

Lists with another number of items in another run are no results of the op. A trace is given a list in which it cannot
look, and what looks into it is kept whole, too. What may be done is `torch.cat(features)`: the op returns the tensor
that this makes, of which only a run tells how many rows it has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxpipe.capture.twins.untraced_lists import with_unknown_items
from fxpipe.ir.graph.opaque_call import Place, apart

NO_RESULT = object()  # marks a result that an op cannot have


@dataclass(frozen=True, eq=False)
class Part:
    """A part of what a call returned.

    - `inside`: the parts of it; None for a leaf. `together` builds it from these. `kind`: its type.
    - `leaf`: a tensor without memory, or what a leaf is otherwise. `content`: a copy of the tensor, if that was wanted.
    - `items`: of the items of a list one after another, how many; `contents`: copies of them.
    """

    kind: type
    inside: tuple[Part, ...] | None = None
    together: Callable[[list[Any]], Any] = list
    leaf: Any = None
    content: Tensor | None = None
    items: int = 0
    contents: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, value: Any, copies: bool) -> Part:
        """`copies`: whether copies of tensors are wanted."""
        parts = apart(value)
        if parts is not None:
            return cls(type(value), tuple(cls.of(item, copies) for item in parts[1]), parts[0])
        copied = value.detach().clone() if copies and isinstance(value, Tensor) else None
        return cls(type(value), leaf=_hollow(value), content=copied)

    def at(self, place: Place) -> Part:
        """The part at a place."""
        found = self
        for number in place:
            assert found.inside is not None
            found = found.inside[number]
        return found

    @property
    def joined(self) -> Part | None:
        """The items one after another, as one tensor; None if they are no tensors that fit together."""
        parts = self.inside or ()
        if not parts or not all(isinstance(part.leaf, Tensor) and part.leaf.dim() for part in parts):
            return None
        if len({(part.leaf.dtype, part.leaf.shape[1:]) for part in parts}) > 1:
            return None
        contents = tuple(part.content for part in parts if part.content is not None)
        with torch.enable_grad():
            leaf = torch.cat([part.leaf for part in parts])
        return Part(Tensor, leaf=leaf, items=len(parts), contents=contents)

    def leaves(
        self, without: Collection[Place] = (), joined: Collection[Place] = (), place: Place = ()
    ) -> Iterator[Part]:
        """The leaves, in order, but for those at the places `without`; of the lists at the places `joined`, the items
        one after another."""
        if self.inside is None:
            yield self
        elif place not in without:
            for at, part in enumerate(self.inside):
                yield from part.leaves(without, joined, (*place, at))
        elif place in joined and (whole := self.joined) is not None:
            yield whole

    def form(self, without: Collection[Place], joined: Collection[Place] = ()) -> Callable[[Any], Any]:
        """A function from the tensors in such an object, or the one tensor, to the object; Dynamo traces it."""
        make, count = self._maker(without, joined, (), 0)
        return make if count != 1 else lambda tensor: make([tensor])

    def _maker(
        self, without: Collection[Place], joined: Collection[Place], place: Place, at: int
    ) -> tuple[Callable[[Any], Any], int]:
        if isinstance(self.leaf, Tensor):
            return lambda tensors: tensors[at], at + 1
        if self.inside is None:
            return lambda tensors: self.leaf, at
        if place in without:  # made in the trace, which then guards nothing of it
            unknown = with_unknown_items(self.kind)
            if place in joined:
                return lambda tensors: unknown.joining(tensors[at]), at + 1
            return lambda tensors: unknown(()), at
        makers = []
        for number, part in enumerate(self.inside):
            maker, at = part._maker(without, joined, (*place, number), at)
            makers.append(maker)
        return lambda tensors: self.together([maker(tensors) for maker in makers]), at


def other_lengths(one: Part, two: Part, place: Place = ()) -> Iterator[Place]:
    """The places of the lists and tuples inside of two results that have another number of items in each."""
    if one.inside is None or two.inside is None or one.kind is not two.kind:
        return
    if len(one.inside) != len(two.inside):
        if one.kind in (list, tuple):
            yield place
        return
    for at, (part, other) in enumerate(zip(one.inside, two.inside, strict=True)):
        yield from other_lengths(part, other, (*place, at))


def joinable(part: Part, alike: bool, place: Place = ()) -> Iterator[Place]:
    """The places of the lists and tuples inside of a result whose items are tensors that can be put one after another;
    unless `alike`, only those with tensors of several lengths."""
    if part.inside is None:
        return
    found = part.joined if part.kind in (list, tuple) and place else None
    if found is not None and (alike or len({item.leaf.shape[0] for item in part.inside}) > 1):
        yield place
        return
    for at, inner in enumerate(part.inside):
        yield from joinable(inner, alike, (*place, at))


def _hollow(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout is not torch.strided:
        return NO_RESULT
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return made.requires_grad_(leaf.requires_grad)
