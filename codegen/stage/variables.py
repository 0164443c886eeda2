"""Which Python variable holds each value of a stage.

In the graph every value has a name of its own: `x`, `x_1`, `x_2`. A person writes `x = f(x)`. So a value gets its plain
name, without the number, as soon as the variable of that name is no longer needed. Takes and gives keep their full
names, so that the header, the code and the scheduler use the same ones. Rebinding also frees the old tensor; other
large tensors that are no longer needed would live until forward ends, so they are deleted with `del`.
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from fxpipe.codegen.text.op_text import in_place_sign
from fxpipe.codegen.text.source_names import RESERVED, identifier
from fxpipe.ir.graph.graph import Op, Ref
from fxpipe.ir.graph.shared_memory_values import viewed
from fxpipe.ir.graph.value_types import ObjectType, TupleType, ValueType, tensors
from fxpipe.ir.program.program import Stage

NONE = ObjectType("None")
MOST_TARGETS = 8  # a line `a, b, c = ...` with more names is no longer easy to read


@dataclass(frozen=True)
class Variables:
    """The variables of a stage.

    - `of`: the source text of each value.
    - `unpacked`: for an op whose result is unpacked at once, the values that are its items; "" for None.
    - `folded`: the getitem ops that are not needed because of that.
    - `last_use`: the position of the last op that reads a value; `math.inf` for gives and borrows.
    """

    of: Mapping[str, str]
    unpacked: Mapping[str, tuple[str, ...]]
    folded: Collection[str]
    last_use: Mapping[str, float]

    @property
    def names(self) -> frozenset[str]:
        """The names of the variables themselves, and `self`."""
        return frozenset(text.partition(".")[0] for text in self.of.values())


def assign(
    stage: Stage,
    types: Mapping[str, ValueType],
    states: Mapping[str, str],
    taken: Collection[str],
    rebound: Collection[str] = (),
) -> Variables:
    """Variables for a stage. `states` is the source of each tensor it owns, `taken` are names that the file uses. The
    values in `rebound`, if they are results of in-place ops, have one variable from where their memory is made."""
    last_use = _last_use(stage)
    unpacked = _unpackable(stage, types, last_use)
    folded = {item for items in unpacked.values() for item in items if item}
    names = _Names(RESERVED | set(taken), last_use)
    of = dict(states)
    of |= {name: names.pin(name) for name in (*stage.takes, *stage.borrows)}
    here = {op.name for op in stage.ops}
    pinned = {name: names.pin(name) for name in stage.gives if name in here}
    following = set(rebound)
    for position, op in reversed(list(enumerate(stage.ops))):
        if (
            op.name in following
            and op.name in pinned
            and rebinds(op)
            and last_use.get(_written(op)) == position
            and _written(op) in here
        ):
            pinned.setdefault(_written(op), pinned[op.name])
            following.add(_written(op))
    for position, op in enumerate(stage.ops):
        if op.name in folded:
            continue
        for value in unpacked.get(op.name, (op.name,)):
            first = position if value == op.name else -1
            if value in pinned:
                of[value] = pinned[value]
            elif first >= 0 and rebinds(op):
                of[value] = of[_written(op)]
                names.move(of[value], value)
            elif value in last_use:
                of[value] = names.new(value, position)
    return Variables(of, unpacked, folded, last_use)


def rebinds(op: Op) -> bool:
    """Whether Python's result of the op is its first argument itself, so that no new variable is needed."""
    if not op.args or not isinstance(op.args[0], Ref) or op.args[0].name not in op.writes:
        return False
    if isinstance(op.target, str):
        return op.target.endswith("_") and not op.target.endswith("__")
    return op.target is operator.setitem or in_place_sign(op) is not None


def _written(op: Op) -> str:
    return str(op.args[0].name)


class _Names:
    """The variables in use, walking down the stage. A variable is free once its value has been read for the last
    time: the op that reads it may be the one that overwrites it."""

    def __init__(self, reserved: Collection[str], last_use: Mapping[str, float]) -> None:
        self.reserved = set(reserved)
        self.last_use = last_use
        self.holder: dict[str, str] = {}

    def pin(self, value: str) -> str:
        """A variable for what the stage takes or gives."""
        name = self._first_free((identifier(value),), -1)
        self.holder[name] = value
        if self.last_use.get(value, -1) == math.inf:
            self.reserved.add(name)
        return name

    def new(self, value: str, position: int) -> str:
        """A variable for the result of the op at `position`. What is computed again ends with an underscore in the
        graph; its variable is `view`, else `view_1`."""
        base = re.sub(r"(?<=.)_\d+_*$|(?<=_)_+$", "", value)
        numbered = (name for number in count(1) if self._free(name := f"{base}_{number}", position))
        other = next(numbered) if value.endswith("_") else value
        name = self._first_free((identifier(base), identifier(other)), position)
        self.holder[name] = value
        return name

    def move(self, variable: str, value: str) -> None:
        """The variable now holds another value."""
        if variable in self.holder:
            self.holder[variable] = value

    def _first_free(self, wishes: Sequence[str], position: int) -> str:
        name = next((name for name in wishes if self._free(name, position)), wishes[-1])
        while not self._free(name, position):
            name += "_"
        return name

    def _free(self, name: str, position: int) -> bool:
        if name in self.reserved:
            return False
        return name not in self.holder or self.last_use.get(self.holder[name], -1) <= position


def _last_use(stage: Stage) -> dict[str, float]:
    last: dict[str, float] = {}
    for position, op in enumerate(stage.ops):
        for name in (*op.reads, *op.writes):
            last[name] = position
    return last | dict.fromkeys((*stage.gives, *stage.borrows), math.inf)


def _unpackable(
    stage: Stage, types: Mapping[str, ValueType], last_use: Mapping[str, float]
) -> dict[str, tuple[str, ...]]:
    """The ops with several results that can be written `a, b = f(x)`: each result is read by one getitem of the same
    line of the user's, and nothing else reads them."""
    readers: dict[str, list[Op]] = defaultdict(list)
    for op in stage.ops:
        for name in op.reads:
            readers[name].append(op)
    found = {}
    for op in stage.ops:
        kind = types[op.name]
        if isinstance(kind, TupleType) and 2 <= len(kind.items) <= MOST_TARGETS:
            items = _items(op, readers[op.name], kind)
            if items and all(item in last_use for item in items if item):
                found[op.name] = items
    return found


def _items(op: Op, readers: Sequence[Op], kind: TupleType) -> tuple[str, ...] | None:
    place: dict[int, str] = {}
    for reader in readers:
        if reader.target is not operator.getitem or type(reader.args[1]) is not int or reader.args[0] != Ref(op.name):
            return None
        if reader.origin != op.origin or reader.args[1] in place:
            return None
        place[reader.args[1]] = reader.name
    needed = {index for index, item in enumerate(kind.items) if item != NONE}
    if not place or not needed <= place.keys():
        return None
    return tuple(place.get(index, "") for index in range(len(kind.items)))


# Letting go ----------------------------------------------------------------------------------------------------------

LARGE = 1 << 16  # elements; a smaller tensor is not worth a `del`


def releases(
    stage: Stage, variables: Variables, types: Mapping[str, ValueType], owned: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """The variables to delete after each op: those of large tensors that are no longer needed, unless one of the next
    statements rebinds the variable. A view keeps its base's memory alive, so both are deleted together. Takes are not
    deleted, as the caller holds them, unless they are `owned`.

        y = h.view(8, -1)
        z = y + 1
        del h, y
    """
    dying: dict[float, list[str]] = defaultdict(list)
    for name, position in variables.last_use.items():
        dying[position].append(name)
    bound = {position: _bound(op, variables) for position, op in enumerate(stage.ops)}
    made = defaultdict(int, {op.name: position for position, op in enumerate(stage.ops)})
    holder = {variables.of[name]: name for name in owned if name in variables.of}  # the value of each variable
    shared: dict[str, list[str]] = defaultdict(list)  # for a view, the values whose memory it keeps alive
    found = {}
    for position, op in enumerate(stage.ops):
        holder |= bound[position]
        soon = {name for later in range(position, position + 3) for name in bound.get(later, ())}
        gone = []
        for name in dying[position]:
            memory = [*shared.pop(name, ()), name]
            if name in op.writes or viewed(op, types) == name:  # letting go of it frees nothing yet
                shared[op.name] += memory
            elif _is_large(types[name]):
                gone += memory
        names = ((variables.of.get(value, ""), value) for value in sorted(gone, key=made.__getitem__))
        found[op.name] = tuple(name for name, value in names if holder.get(name) == value and name not in soon)
    return found


def _bound(op: Op, variables: Variables) -> dict[str, str]:
    """The variables that the op's statement sets, with the values they then hold."""
    values = variables.unpacked.get(op.name, (op.name,)) if op.name not in variables.folded else ()
    return {variables.of[name]: name for name in values if name in variables.of}


def _is_large(kind: ValueType) -> bool:
    """Whether a tensor in the value is large. Sizes that depend on the batch count as large."""
    return any(
        any(isinstance(dim, str) for dim in item.shape) or math.prod(map(int, item.shape)) >= LARGE
        for item in tensors(kind)
    )
