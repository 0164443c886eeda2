"""Moves cuts between stages to where fewer bytes cross, if a step takes about as long then.

    cut after   step     crosses
    layer 19    1.000 s  302 MB     inside of a feed-forward network
    layer 20    1.004 s   67 MB     between two layers of the model: taken

The times are predictions with errors of a few percent, so a smaller difference says little; the bytes are known.
"""

from __future__ import annotations

from dataclasses import replace

from fxpipe.ir.plan.hybrid_plan import HybridPlan
from fxpipe.pipe.results.planned import Planned

SLACK = 0.02  # by which share the step may take longer
FARTHEST = 3  # layers that a cut may move
LESS = 0.9  # the share of the bytes that may cross at most


def cheaper_cuts(found: Planned) -> HybridPlan:
    """The plan of layers with each cut moved to where fewer bytes cross, as long as the simulated step takes at most
    `SLACK` longer in all, and devices that had enough memory still have. The same object if no cut moves."""
    best, roomy = found, fits(found)
    for s in range(len(found.layers.stages) - 1):
        here, after = best.layers.stages[s : s + 2]
        cuts = best.chains[after.way].cuts
        near = range(max(here.first + 1, here.end - FARTHEST), min(after.end - 1, here.end + FARTHEST) + 1)
        fewer = [at for at in near if cuts[at] < LESS * cuts[here.end]]
        for at in sorted(fewer, key=lambda at: (cuts[at], abs(at - here.end))):
            moved = replace(best, layers=_moved(best.layers, s, at))
            if moved.seconds <= (1 + SLACK) * found.seconds and (fits(moved) or not roomy):
                best = moved
                break
    return best.layers


def _moved(plan: HybridPlan, stage: int, end: int) -> HybridPlan:
    """The plan whose stage ends after another layer."""
    stages = list(plan.stages)
    stages[stage], stages[stage + 1] = replace(stages[stage], end=end), replace(stages[stage + 1], first=end)
    return replace(plan, stages=tuple(stages))


def fits(found: Planned) -> bool:
    """Whether the simulated step fits in the memory of every device."""
    return all(held <= found.cluster.device(label).memory for label, held in found.memory.items())
