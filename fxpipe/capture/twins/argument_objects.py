"""What forward does to the user's own objects among the arguments of a call: caches fill, counters count, lists grow.

    the user's object          its stand-in, which forward is given
      cache                      a copy if tensors are in it, else the very same object
        .keys   a tensor           .keys   without memory; forward sets it to another one
        .seen   4                  .seen   4, which forward sets to 7

After a dry pass the stand-ins are put back. After a run the user's objects get what forward has set, with real tensors,
and where forward refers to a stand-in, with the user's object.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

from fxpipe.capture.nested_values import HiddenItems, Memo, Swap, change

from .twin_copies import slots_of

MISSING = object()
LISTS = (list, deque)


class Held(NamedTuple):
    """What an object holds: its attributes; and its items, by key of a dict, or in order of a list."""

    attributes: dict[str, Any]
    items: dict[Any, Any] | list[Any] | set[Any] | None

    def changes(self, before: Held) -> tuple[dict[str, Any], Any]:
        """The attributes that differ from those `before`, MISSING where there is none now; and all items if some of
        them differ, else None."""
        names = dict.fromkeys((*before.attributes, *self.attributes))
        new = {name: self.attributes.get(name, MISSING) for name in names}
        changed = {name: value for name, value in new.items() if value is not before.attributes.get(name, MISSING)}
        return changed, None if _same(self.items, before.items) else self.items


def _same(left: Any, right: Any) -> bool:
    """Whether the very same things are in the two collections, in the same order."""
    if isinstance(left, dict):
        return list(left) == list(right) and all(value is right[key] for key, value in left.items())
    if isinstance(left, list):
        return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))
    return bool(left == right)


def holding(value: Any) -> Held:
    """What an object holds now."""
    attributes = dict(getattr(value, "__dict__", ()))
    attributes |= {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}
    if isinstance(value, MutableMapping):
        return Held(attributes, dict(value))
    if isinstance(value, LISTS) and not isinstance(value, HiddenItems):
        return Held(attributes, list(value))
    return Held(attributes, set(value) if type(value) is set else None)


def put(value: Any, attributes: Mapping[str, Any], items: Any) -> None:
    """Give an object these attributes, and, unless None, these items instead of its own."""
    for name, new in attributes.items():
        if new is MISSING:
            object.__delattr__(value, name)
        elif name in slots_of(type(value)):
            object.__setattr__(value, name, new)
        else:
            vars(value)[name] = new
    if isinstance(items, dict):
        for key in [key for key in value if key not in items]:
            del value[key]
        for key, item in items.items():
            if key not in value or value[key] is not item:
                value[key] = item
    elif items is not None:
        value.clear()
        (value.extend if isinstance(items, list) else value.update)(items)


class ArgumentObjects:
    """The objects among the arguments of a call that can be changed.

    - `memo`: by the `id` of each of the user's, it and its stand-in.
    """

    def __init__(self) -> None:
        self.memo: Memo = {}
        self._held: list[tuple[Any, Any, Held]] = []

    def begin(self) -> None:
        """Keep what the stand-ins hold, before forward is given them."""
        pairs = ((user, stand_in, holding(stand_in)) for user, stand_in in self.memo.values())
        self._held = [(*pair, held) for *pair, held in pairs if held.attributes or held.items is not None]

    def restore(self) -> tuple[Any, ...]:
        """Undo all changes of stand-ins. Returns the new values."""
        found: list[Any] = []
        for _, stand_in, before in self._held:
            attributes, items = holding(stand_in).changes(before)
            if attributes or items is not None:
                found += [*(value for value in attributes.values() if value is not MISSING), items]
                old = {name: before.attributes.get(name, MISSING) for name in attributes}
                put(stand_in, old, None if items is None else before.items)
        return tuple(found)

    def shown(self, result: Any) -> Any:
        """A result with copies of the changed stand-ins, which stay as they are when those are put back."""
        changed = [one for _, one, before in self._held if any(_is_change(holding(one).changes(before)))]
        memo = {id(one): (one, copy.copy(one)) for one in changed}
        for _, made in tuple(memo.values()):
            held = holding(made)
            parts = {name: change(value, _itself, memo=memo) for name, value in held.attributes.items()}
            put(made, parts, _changed(held.items, _itself, memo))
        return change(result, _itself, memo=memo)

    def give_back(self, real: Swap) -> Memo:
        """Let the user's objects be what forward has made of the stand-ins. `real`: gives the real tensor for one
        without memory. Returns the user's object for each stand-in, for `change`."""
        back: Memo = {id(stand_in): (stand_in, user) for user, stand_in, _ in self._held}
        for user, stand_in, before in self._held:
            attributes, items = holding(stand_in).changes(before)
            new = {
                name: value if value is MISSING else change(value, real, memo=back)
                for name, value in attributes.items()
            }
            put(user, new, _changed(items, real, back))
        return back


def _is_change(changes: tuple[dict[str, Any], Any]) -> tuple[bool, bool]:
    return bool(changes[0]), changes[1] is not None


def _itself(path: str, tensor: Any) -> Any:
    return tensor


def _changed(items: Any, swap: Swap, memo: Memo) -> Any:
    """Items with other tensors and objects; a set has none."""
    if isinstance(items, dict):
        return {key: change(item, swap, memo=memo) for key, item in items.items()}
    return [change(item, swap, memo=memo) for item in items] if isinstance(items, list) else items
