"""What a device of a group takes from the stage before, at each place where a stage may begin.

    stage a             cut             stage b, group of 2, reads         each of its devices takes
    x = linear(...)      |              relu(x), sharded on 1              a half of x
                         |              add(x, y), replicated              all of x, and of y
    y = linear(...)      |

Whatever layout a value has before the cut, a device takes the regions that its ops read, from devices that have them.
Each region is taken once, however many ops read it, and its gradient goes back the same way. Values that are read after
several cuts cross all of them. What is read in two overlapping regions is counted twice; what a reshape needs around
its region is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxpipe.ir.graph.dtypes import DTYPES
from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.value_types import TensorType, dim_size
from fxpipe.ir.operators.group_layout import OpCut, volume
from fxpipe.ir.operators.strategy import Region
from fxpipe.ir.program.cheap_ops import cheap_ops

Regions = tuple[tuple[Region, ...], ...]  # of each device


def group_traffic(graph: Graph, sizes: Mapping[str, int], cuts: Mapping[str, OpCut], degree: int) -> list[int]:
    """Bytes that a device of a group of `degree` takes across a cut at each position of the graph's ops, from 0 to
    their number: of each value those of the device that takes most of it. `cuts`: how each op is computed."""
    cheap, made, types = cheap_ops(graph), {op.name for op in graph.ops}, graph.types
    taken = dict[str, list[Regions]]()  # of each value, by the ops after the cut
    held = dict[str, int]()  # bytes of these
    found, total = [0] * (len(graph.ops) + 1), 0
    for at in range(len(graph.ops) - 1, -1, -1):
        op = graph.ops[at]
        total -= held.pop(op.name, 0)
        known = dict(cuts[op.name].reads)
        for name in dict.fromkeys((*op.reads, *known)):
            kind = types[name]
            if name in cheap or name not in made or not isinstance(kind, TensorType):
                continue
            regions = known.get(name) or _whole(kind, sizes, degree)
            if regions not in taken.setdefault(name, []):
                taken[name].append(regions)
                count = max(sum(map(volume, own)) for own in regions) * DTYPES[kind.dtype].size
                held[name] = held.get(name, 0) + count
                total += count
        found[at] = total
    return found


def _whole(kind: TensorType, sizes: Mapping[str, int], degree: int) -> Regions:
    return ((tuple((0, dim_size(dim, sizes)) for dim in kind.shape),),) * degree
