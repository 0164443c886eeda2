"""How the devices of a tensor-parallel group share one op: the layout of its result, and what each device reads.

    op       cut               result                       reads of device 0 of 2
    norm     replicated        whole on each device         all
    widen    sharded on 2      channels 0..4 | 4..8         all of x, rows 0..4 of the weight
    narrow   summed            whole on each, added up      channels 0..4 of x, columns 0..4 of the weight

Layouts are those of DTensor: a tensor is replicated, or sharded along one dimension. Partial sums are added up at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from tabulate import tabulate

from .strategy import Region, split


@dataclass(frozen=True)
class Layout:
    """Where the numbers of a tensor are. Each device has the whole if `dim` is None, else an equal part of that
    dimension. With `blocks` above 1 the dimension has that many equal blocks, and a device has its part of each:
    queries, keys and values of some heads, from a layer that makes all three."""

    dim: int | None = None
    blocks: int = 1

    def __str__(self) -> str:
        if self.dim is None:
            return "replicated"
        return f"sharded on {self.dim}" + (f" in {self.blocks} blocks" if self.blocks > 1 else "")


REPLICATED = Layout()


@dataclass(frozen=True)
class OpCut:
    """One way to compute an op on a group of devices.

    - `layout`: of its result.
    - `reads`: for each value that it reads, the regions that each device reads; values not named are read whole.
    - `summed`: 0, or if devices compute partial sums, which are then added up, the blocks of the dimension that is
      summed over, as in `Layout`.
    """

    layout: Layout = REPLICATED
    reads: tuple[tuple[str, tuple[tuple[Region, ...], ...]], ...] = ()
    summed: int = 0


@dataclass(frozen=True)
class OpSharding:
    """What was chosen for one op.

    - `op`: its name; `kind`: what it calls, such as "linear".
    - `layout`, `summed`: as in `OpCut`.
    - `gathered`: whether the sharded result is then given to all devices of the group, for several readers.
    """

    op: str
    kind: str
    layout: Layout = REPLICATED
    summed: int = 0
    gathered: bool = False

    def __str__(self) -> str:
        words = ["summed"] * bool(self.summed) + [str(self.layout)] + ["gathered"] * self.gathered
        return ", ".join(words)


def show(shardings: Iterable[OpSharding]) -> str:
    """How often each kind of op is cut in each way; kinds that are only replicated are left out.

    >>> print(show([OpSharding("a", "linear", Layout(2)), OpSharding("b", "linear", REPLICATED, summed=1)]))
    how devices share ops
      linear  1 sharded on 2; 1 summed, replicated
    """
    ways: dict[str, Counter[str]] = {}
    for one in shardings:
        ways.setdefault(one.kind, Counter())[str(one)] += 1
    rows = [
        (kind, "; ".join(f"{count} {way}" for way, count in found.most_common()))
        for kind, found in ways.items()
        if found.keys() != {str(REPLICATED)}
    ]
    lines = tabulate(rows, tablefmt="plain", disable_numparse=True).splitlines()
    return "\n".join(["how devices share ops", *(f"  {line}" for line in lines)])


def boxes(layout: Layout, shape: tuple[int, ...], degree: int, device: int) -> tuple[Region, ...]:
    """The regions of a tensor of this shape that a device of the group has; the parts of a dimension are as even as
    possible, and those that are empty are left out.

    >>> boxes(Layout(1, 2), (3, 8), 2, 1)
    (((0, 3), (2, 4)), ((0, 3), (6, 8)))
    >>> boxes(Layout(0), (1, 8), 2, 1)
    ()
    """
    full = tuple((0, size) for size in shape)
    if layout.dim is None:
        return (full,)
    dim, each = layout.dim, shape[layout.dim] // layout.blocks
    first, after = split(each, degree, device)
    ranges = ((block * each + first, block * each + after) for block in range(layout.blocks) if after > first)
    return tuple((*full[:dim], own, *full[dim + 1 :]) for own in ranges)


def volume(region: Region) -> int:
    """The number of elements in a region."""
    return prod(after - first for first, after in region)
