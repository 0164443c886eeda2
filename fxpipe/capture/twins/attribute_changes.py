"""What forward sets: the attributes of modules and other objects before and after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fxpipe.capture.nested_values import ATOMS

from .twin_copies import MOST_ITEMS

PARTS = ("_modules", "_parameters", "_buffers")  # what hangs there is looked at in other ways
DEPTH = 3  # how far from a module an object may be that forward is expected to change


@dataclass(frozen=True)
class Change:
    """What an attribute of `holder` was set to."""

    holder: Any
    value: Any


Changes = dict[tuple[int, str], Change]  # by the id of the holder and the attribute


class Snapshot:
    """The Python attributes of modules and other objects as they are now, and of the plain objects that hang on them,
    such as a configuration; with the contents of lists, dicts and sets."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self.kept = [(holder, dict(vars(holder)), _contents(holder)) for holder in holders(objects)]

    def restore(self) -> Changes:
        """Put everything back; gives what was there instead."""
        changes: Changes = {}
        for holder, attributes, contents in self.kept:
            now = vars(holder)
            for name in list(attributes.keys() | now.keys()):
                if name not in attributes:
                    changes[id(holder), name] = Change(holder, now.pop(name))
                elif name not in now or now[name] is not attributes[name]:
                    changes[id(holder), name] = Change(holder, now.get(name))
                    now[name] = attributes[name]
            for name, (container, kept) in contents.items():
                if not _identical(container, kept):
                    changes[id(holder), name] = Change(holder, container.copy())
                    _refill(container, kept)
        return changes


def holders(objects: Iterable[Any]) -> list[Any]:
    """The objects, and those with attributes that they hold, directly or in others."""
    found: dict[int, Any] = {id(holder): holder for holder in objects}
    level = list(found.values())
    for _ in range(DEPTH):
        held = [value for holder in level for value in _held(holder) if has_attributes(value)]
        level = [value for key, value in {id(value): value for value in held}.items() if key not in found]
        found |= {id(value): value for value in level}
    return list(found.values())


def _held(holder: Any) -> Iterator[Any]:
    for name, value in vars(holder).items():
        if name in PARTS or type(value) in ATOMS:
            continue
        if type(value) in (list, tuple, dict) and len(value) <= MOST_ITEMS:
            yield from value.values() if type(value) is dict else value
        else:
            yield value


def has_attributes(value: Any) -> bool:
    if type(value) in ATOMS or isinstance(value, (Tensor, nn.Module, type)):
        return False
    return type(getattr(value, "__dict__", None)) is dict


def _identical(left: Any, right: Any) -> bool:
    """Whether two lists, dicts or sets hold the very same objects."""
    pairs = ((c.keys(), c.values()) if isinstance(c, dict) else (c, ()) for c in (left, right))
    (a, b), (c, d) = ((list(x), list(y)) for x, y in pairs)
    return list(map(id, a)) == list(map(id, c)) and list(map(id, b)) == list(map(id, d))


def _refill(container: Any, kept: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(kept)


def _contents(holder: Any) -> dict[str, tuple[Any, Any]]:
    """The holder's own lists, dicts and sets, each with a copy."""
    own = {name: value for name, value in vars(holder).items() if name not in PARTS}
    return {name: (value, value.copy()) for name, value in own.items() if type(value) in (list, dict, set)}
