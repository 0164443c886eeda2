"""Which devices a stage gets: DAPPLE's three policies, which look at how many devices of each server are in use.

    servers of 4, in use 3 and 0      2 more:  fresh first     2 on the second server
                                               append first    1 on the first, 1 on the second
                                               scatter first   1 on each

Devices of a server are alike and taken in order, so a placement is a count per server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fxpipe.ir.cluster.cluster import Cluster

Counts = tuple[int, ...]  # devices per server


def servers(cluster: Cluster) -> list[list[int]]:
    """For each server the positions of its devices in the cluster."""
    by_server: dict[str, list[int]] = {}
    for position, device in enumerate(cluster.devices):
        by_server.setdefault(device.server, []).append(position)
    return list(by_server.values())


def placements(sizes: Counts, used: Counts, need: int) -> list[Counts]:
    """The different placements of `need` more devices by the policies, as counts per server. Fresh first and append
    first go on to the other servers if theirs do not suffice.

    >>> placements((4, 4), (3, 0), 2)
    [(0, 2), (1, 1)]
    >>> placements((8, 8), (3, 0), 4)
    [(0, 4), (4, 0), (2, 2)]
    """
    indices = range(len(sizes))
    fresh = [s for s in indices if not used[s]]
    begun = [s for s in indices if used[s]]
    found = [fill(sizes, used, need, order) for order in (fresh + begun, begun + fresh)]
    found.append(scatter(sizes, used, need))
    return list(dict.fromkeys(one for one in found if one is not None))


def fill(sizes: Counts, used: Counts, need: int, order: Iterable[int]) -> Counts | None:
    """All free devices of one server after the other, in this order; None if they do not suffice."""
    given = [0] * len(sizes)
    for server in order:
        given[server] = min(sizes[server] - used[server], need)
        need -= given[server]
    return None if need else tuple(given)


def scatter(sizes: Counts, used: Counts, need: int) -> Counts | None:
    """One from each server in turn; None if they do not suffice."""
    given = [0] * len(sizes)
    if need > sum(sizes) - sum(used):
        return None
    while need:
        for server, size in enumerate(sizes):
            if need and used[server] + given[server] < size:
                given[server] += 1
                need -= 1
    return tuple(given)


def plus(a: Counts, b: Counts) -> Counts:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def minus(a: Counts, b: Counts) -> Counts:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def positions(groups: Sequence[Sequence[int]], used: Counts, counts: Counts) -> tuple[int, ...]:
    """The positions of the next `counts` devices after those `used`, ascending."""
    taken = (group[a : a + b] for group, a, b in zip(groups, used, counts, strict=True))
    return tuple(sorted(position for part in taken for position in part))
