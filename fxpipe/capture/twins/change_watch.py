"""Whether the user has changed the model since the last look: attributes, items, classes, or facts of tensors.

This is checked before each call of a pipe, for every module, so it is a few loops in C; the changed objects are only
searched if something differs. Objects are compared by identity, and are kept alive, so that an id is not reused.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

from .script_twin import beside_python
from .twin_copies import DICTS, LISTS, SETS, is_plain, slots_of

FACTS = attrgetter("requires_grad", "dtype", "shape")  # what may change of a tensor that stays the same object


class Watch:
    """What was found in these objects, and of these tensors."""

    def __init__(self, objects: Iterable[Any], tensors: Iterable[Tensor] = ()) -> None:
        self.tensors = list(tensors)
        self.facts = list(map(FACTS, self.tensors))
        self.views: list[Any] = []  # live views of attributes and items
        self.owners: list[Any] = []  # whose those are
        self.empty: list[Any] = []
        self.slotted: list[tuple[Any, list[str], list[Any]]] = []
        self.modules: list[nn.Module] = []
        for item in objects:
            if type(item) in DICTS and item:
                self._look(item, item.keys(), item.values())
            elif type(item) in (*DICTS, *LISTS, *SETS):
                self._look(item, item) if item else self.empty.append(item)
            elif isinstance(item, nn.Module) or is_plain(item):
                self.modules.append(item)
                self._look(item, vars(item).values())
                if names := [*slots_of(type(item)), *beside_python(item)]:
                    self.slotted.append((item, names, _slot_values(item, names)))
        self.kinds = list(map(type, self.modules))
        self.lengths = list(map(len, self.views))
        self.kept = list(chain.from_iterable(self.views))
        self.starts: dict[int, tuple[int, int]] | None = None

    def _look(self, owner: Any, *views: Any) -> None:
        self.views += views
        self.owners += [owner] * len(views)

    def still(self) -> bool:
        """Whether all is as it was."""
        return (
            list(map(len, self.views)) == self.lengths
            and all(map(is_, chain.from_iterable(self.views), self.kept))
            and not any(self.empty)
            and list(map(FACTS, self.tensors)) == self.facts
            and list(map(type, self.modules)) == self.kinds
            and all(_is_same(_slot_values(item, names), kept) for item, names, kept in self.slotted)
        )

    def changed(self) -> list[Any]:
        """The objects in which something is new."""
        found = [item for item in self.empty if item]
        found += [item for item, kind in zip(self.modules, self.kinds, strict=True) if type(item) is not kind]
        found += [item for item, names, kept in self.slotted if not _is_same(_slot_values(item, names), kept)]
        start = 0
        for owner, view, length in zip(self.owners, self.views, self.lengths, strict=True):
            if not _is_same(list(view), self.kept[start : start + length]):
                found.append(owner)
            start += length
        return list({id(item): item for item in found}.values())

    def keep(self, owner: Any, name: str, value: Any) -> None:
        """Note the value that a call has set, so that the attribute does not count as changed by the user."""
        if self.starts is None:
            ends = accumulate(self.lengths)
            rows = zip(self.owners, self.lengths, ends, strict=True)
            self.starts = {id(item): (end - length, length) for item, length, end in rows}
        start, length = self.starts.get(id(owner), (0, -1))
        if len(vars(owner)) == length:
            self.kept[start + list(vars(owner)).index(name)] = value


def _is_same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))


def _slot_values(item: Any, names: list[str]) -> list[Any]:
    return [getattr(item, name, None) for name in names]
