"""How much faster a step would be on a changed cluster: with the same strategy, and with one searched for that cluster.

what if              as it is          searched again
one more server      26.2 ms   +0.0%   22.9 ms         -12.6%
twice the bandwidth  22.4 ms  -14.5%   21.8 ms         -16.8%
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tabulate import tabulate

from fxpipe.ir.cluster.cluster import Cluster
from fxpipe.ir.cluster.what_if import one_more_server, widened
from fxpipe.ir.units import show_seconds
from fxpipe.pipe.progress import timed
from fxpipe.pipe.results.searched import Searched

from .search import search

CHANGES: dict[str, Callable[[Cluster], Cluster]] = {
    "one more server": one_more_server,
    "twice the bandwidth": widened,
}
Row = tuple[str, str, str, str, str, str]


def explain(found: Searched, budget: float = 60) -> str:
    """The strategy as text, and a table of step times on changed clusters, each searched for `budget` seconds."""
    rows = [_row(found, name, change, budget) for name, change in CHANGES.items()]
    heads = ("what if", "as it is", "", "searched again", "", "")
    table = tabulate(rows, heads, tablefmt="plain", disable_numparse=True).splitlines()
    return "\n".join([str(found), "", *(line.rstrip() for line in table)])


def _row(found: Searched, name: str, change: Callable[[Cluster], Cluster], budget: float) -> Row:
    try:
        cluster = change(found.cluster)
    except ValueError as error:
        return name, "", "", "", "", str(error)
    kept = replace(found, cluster=cluster)
    with timed(name):
        again = search(
            found.graph,
            cluster,
            budget=budget,
            micro_batches=found.strategy.micro_batches,
            parameter_copies=found.copies,
        )
    best = min(kept, again, key=lambda one: one.seconds)
    return name, *_beside(found, kept), *_beside(found, best), ""


def _beside(found: Searched, other: Searched) -> tuple[str, str]:
    return show_seconds(other.seconds), f"{other.seconds / found.seconds - 1:+.1%}"
