"""Where a cut may lie between stages of different numbers of replicas: not where a value crosses that cannot be cut
between samples, such as a mean over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

from fxpipe.ir.graph.graph import Graph
from fxpipe.ir.graph.legal_cuts import spans
from fxpipe.ir.program.cheap_ops import cheap_ops


def replica_cuts(
    graph: Graph, legal: Sequence[int], replicas: Sequence[int], uncut: Collection[str]
) -> list[Sequence[int]]:
    """For each cut between stages with these numbers of replicas, the positions of `legal` where it may lie; all of
    them, if none would be left. `uncut` are the values that cannot be cut between samples."""
    changes, span, cheap = Counter[int](), spans(graph), cheap_ops(graph)
    for name in set(uncut) & span.keys() - cheap:
        defined, last = span[name]
        if defined >= 0:
            changes[defined + 1] += 1
            changes[last + 1] -= 1
    across = list(accumulate(changes[p] for p in range(len(graph.ops) + 1)))
    free = [p for p in legal if not across[p]] or legal
    return [legal if a == b else free for a, b in pairwise(replicas)]
