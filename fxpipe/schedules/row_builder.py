"""What the generators of schedules share: a check of their arguments, and two ways to build a row."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from fxpipe.ir.schedule.schedule import Action


def at_least_one(**numbers: int) -> None:
    """Raise ValueError for a number below one."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; a schedule needs at least one")


def turns(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, then the backwards in this order, each followed by a forward while any are left."""
    pairs = zip_longest(backwards, forwards[ahead:])
    return (*forwards[:ahead], *(action for pair in pairs for action in pair if action is not None))


def numbered(cells: Iterable[tuple[str, int]]) -> tuple[Action, ...]:
    """A row from kinds and stages, with numbers of micro-batches. Each stage takes its micro-batches in order, forward
    and backward (B or I); a W is of the oldest I of its stage that has no W yet.

    >>> print(*numbered([("F", 2), ("F", 2), ("I", 2), ("B", 2), ("W", 2)]))
    2F0 2F1 2I0 2B1 2W0
    """
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    owed: dict[int, deque[int]] = defaultdict(deque)
    row: list[Action] = []
    for kind, stage in cells:
        if kind == "W":
            row.append(Action(kind, stage, owed[stage].popleft()))
            continue
        count = forwards if kind == "F" else backwards
        row.append(Action(kind, stage, count[stage]))
        if kind == "I":
            owed[stage].append(count[stage])
        count[stage] += 1
    return tuple(row)
