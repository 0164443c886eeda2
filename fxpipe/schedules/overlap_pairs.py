"""Overlapped pairs: a forward and the backward of another micro-batch that stand side by side run as one action.

    1f1b-late   F0  F1  F2          B0  F3  B1      B2      B3
                    F0  B0  F1  B1  F2  B2  F3  B3

    in pairs    F0  F1  F2      F3+ B0  B1      B2  B3           F3+ B0 is one action
                    F0  F1+ B0  F2+ B1  F3+ B2  B3

On an accelerator, what one of the two sends inside of its stage (tensor or expert parallelism) moves while the other
computes (DeepSeek-V3, section 3.2.1). The price: a pair starts when what both need is there, and nothing leaves before
both are done. So a schedule in which each forward has to be passed on at once, such as 1F1B, takes longer in pairs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from fxpipe.ir.schedule.schedule import Action, Schedule, order
from fxpipe.ir.units import count

Seconds = Callable[[Schedule], float]


def overlapped(
    schedule: Schedule, alone: Collection[int], seconds: Seconds, fits: Callable[[Schedule], bool]
) -> tuple[Schedule, tuple[str, ...]]:
    """The schedule with its pairs, and lines that say how many there are, what they cost, and what is in no pair.

    - `alone`: the stages that cannot be in a pair, because their backward is no code.
    - `seconds`: how long a schedule takes; `fits`: whether memory suffices for it.
    """
    found = overlap_pairs(schedule, alone, seconds)
    named = f"stage{'s' * (len(alone) > 1)} {', '.join(map(str, alone))}"
    others = (f"overlapped pairs: none of {named}, without backward as code",) if alone else ()
    if not found.pairs:
        none = f"overlapped pairs: none; {schedule.name} has no forward beside a backward of another micro-batch"
        return schedule, others or (none,)
    if not fits(found):
        return schedule, ("overlapped pairs: none; what they keep at a time does not fit into memory_limit",)
    functions = count(len({(one.stage, other.stage) for one, other in found.beside.items()}), "function", "functions")
    longer = seconds(found) / seconds(schedule) - 1
    head = f"overlapped pairs: {len(found.pairs)} of a forward and a backward, in {functions}"
    return found, (f"{head}; if nothing in them overlaps, the step takes {longer:.1%} longer, as simulated", *others)


def overlap_pairs(schedule: Schedule, alone: Collection[int], seconds: Seconds) -> Schedule:
    """The schedule with its pairs. `alone`: the stages that are in none; `seconds`: how long a schedule takes.

    Pairs are made in two ways, of each F and the B behind it, or of each B and the F behind it. The schedule with more
    pairs is taken, of equal ones the shorter. Within a pair the forward comes first. A pair with which a device would
    wait for ever stays two actions.

    >>> from fxpipe.schedules.make_schedule import make
    >>> print(overlap_pairs(make("1f1b-late", ("a", "b"), 4), (), lambda schedule: 0.0))
    1f1b-late: 2 stages, 4 micro-batches
    clock       0    1    2    3    4    5    6    7    8    9
    device 0   F0   F1   F2       F3+   B0   B1        B2   B3
    device 1        F0  F1+   B0  F2+   B1  F3+   B2   B3
    """
    made = [_without_deadlock(schedule, kinds, alone) for kinds in ("FB", "BF")]
    return min((one for one in made if one.pairs), key=lambda one: (-len(one.pairs), seconds(one)), default=schedule)


def _without_deadlock(schedule: Schedule, kinds: str, alone: Collection[int]) -> Schedule:
    """The schedule with pairs of neighbours of these kinds, but for those at which a device waits for ever."""
    single: set[Action] = set()
    while True:
        made = _paired(schedule, kinds, lambda f, b: f not in single and not {f.stage, b.stage} & {*alone})
        waiting = (made.devices[device][position] for device, position, _ in order(made)[1])
        first = next((action for action in waiting if action in made.pairs), None)
        if first is None:
            return made
        single.add(first)


def _paired(schedule: Schedule, kinds: str, may: Callable[[Action, Action], bool]) -> Schedule:
    """The schedule with pairs of neighbours of these kinds: of a forward and the backward of another micro-batch that
    `may` be one."""
    pairs: set[Action] = set()
    rows = []
    for row in schedule.devices:
        found: list[Action] = []
        for cell in _cells(row, kinds):
            forward, backward = cell[:: 1 if kinds == "FB" else -1] if len(cell) == 2 else (None, None)
            if forward and backward and forward.micro_batch != backward.micro_batch and may(forward, backward):
                pairs.add(forward)
                cell = (forward, backward)
            found += cell
        rows.append(tuple(found))
    return replace(schedule, devices=tuple(rows), pairs=frozenset(pairs))


def _cells(row: Sequence[Action], kinds: str) -> Iterator[Sequence[Action]]:
    """The row, with neighbours of these kinds together."""
    for cell in re.finditer(f"{kinds}|.", "".join(action.kind for action in row)):
        yield row[cell.start() : cell.end()]
