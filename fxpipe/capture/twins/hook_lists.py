"""Lists that hooks on modules append to: `layer.register_forward_hook(lambda m, args, y: seen.append(y))`.

Dynamo guards the length of a list, so each call with such a hook would be a new kind. In the twin's hook, the list is
replaced by an object with `append` and `extend` that is empty at the start of each call. At the end of the call its
items, as values of the whole batch, are appended to the user's list.
"""

from __future__ import annotations

import dis
from types import CellType, CodeType, FunctionType
from typing import Any

from fxpipe.capture.nested_values import Swap, change

METHODS = ("append", "extend")


class Appended:
    """Stands for the list `own` in a hook that does nothing else with it."""

    def __init__(self, own: list[Any]) -> None:
        self.own = own
        self.items: list[Any] = []

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def give_back(self, real: Swap) -> None:
        """Append the real values to the user's list."""
        self.own.extend(change(self.items, real))
        self.items.clear()


class Lists:
    """The lists that hooks append to, and the functions that stand for these hooks."""

    def __init__(self) -> None:
        self.all: dict[int, Appended] = {}
        self._hooks: dict[int, tuple[Any, Any]] = {}

    def hook(self, hook: Any) -> Any:
        """What stands for a hook: itself, unless it appends to a list."""
        if not isinstance(hook, FunctionType):
            return hook
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        lists = {
            name: cell.cell_contents
            for name, cell in cells.items()
            if only_appends(hook.__code__, name) and _holds_list(cell)
        }
        if not lists:
            return hook
        known = self._hooks.get(id(hook))
        if known is None or known[0] is not hook:
            cells |= {name: CellType(self._appended(own)) for name, own in lists.items()}
            made = FunctionType(
                hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, tuple(cells.values())
            )
            made.__kwdefaults__ = hook.__kwdefaults__
            known = self._hooks[id(hook)] = hook, made
        return known[1]

    def _appended(self, own: list[Any]) -> Appended:
        return self.all.setdefault(id(own), Appended(own))

    def give_back(self, real: Swap) -> None:
        """Append what hooks have appended in this call to the user's lists."""
        for one in self.all.values():
            if one.items:
                one.give_back(real)

    def clear(self) -> None:
        """Forget what was appended."""
        for one in self.all.values():
            one.items.clear()


def _holds_list(cell: CellType) -> bool:
    try:
        return type(cell.cell_contents) is list
    except ValueError:  # it is empty
        return False


def only_appends(code: CodeType, name: str) -> bool:
    """Whether a function does nothing with a variable of its closure but append to it."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    uses = [at for at, step in enumerate(steps) if step.argval == name and step.opname.endswith(("DEREF", "CLOSURE"))]
    return bool(uses) and all(
        steps[at].opname == "LOAD_DEREF"
        and steps[at + 1].opname in ("LOAD_METHOD", "LOAD_ATTR")
        and steps[at + 1].argval in METHODS
        for at in uses
    )
