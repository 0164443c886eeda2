"""Which link a message takes, and for how long. Messages take a link one at a time. It is the sender's port in the
lowest switch that joins it to the receiver (its own port, or its server's), or the link that joins the two.

    cuda:0 -> cuda:1, same server    port of cuda:0 in the server's switch
    cuda:0 -> cuda:5, other server   the network card of the first server, which all its devices share, or cuda:0's own

A message takes the latency and its bytes at the full bandwidth (the SOAP paper's assumption A2). Messages wait for the
sender's port only: if the receiver's port is the bottleneck, the time is too short.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.ir.cluster.cluster import Cluster, link, meeting


@dataclass(frozen=True)
class Links:
    """The links of a cluster, as tables by [sender][receiver].

    - `names`: of the links, by number.
    - `number`: of the link between two devices; -1 on the diagonal.
    - `latency`: seconds; 0 on the diagonal.
    - `bandwidth`: bytes per second; inf on the diagonal.
    """

    names: tuple[str, ...]
    number: tuple[tuple[int, ...], ...]
    latency: tuple[tuple[float, ...], ...]
    bandwidth: tuple[tuple[float, ...], ...]

    def seconds(self, sender: int, receiver: int, size: float) -> float:
        """How long a message of `size` bytes takes, once its turn has come."""
        return self.latency[sender][receiver] + size / self.bandwidth[sender][receiver]


def links(cluster: Cluster) -> Links:
    """The links of a cluster."""
    names: dict[str, int] = {}
    labels = cluster.labels
    ways = [[None if a == b else link(cluster, a, b) for b in labels] for a in labels]
    number = [[-1 if a == b else names.setdefault(_port(cluster, a, b), len(names)) for b in labels] for a in labels]
    return Links(
        tuple(names),
        tuple(map(tuple, number)),
        tuple(tuple(way.latency if way else 0.0 for way in row) for row in ways),
        tuple(tuple(way.bandwidth if way else float("inf") for way in row) for row in ways),
    )


def _port(cluster: Cluster, a: str, b: str) -> str:
    """The name of what a message from `a` to `b` occupies."""
    servers = cluster.device(a).server, cluster.device(b).server
    for one in cluster.links:
        if set(one.ends) in ({a, b}, set(servers)):
            ends = (a, b) if set(one.ends) == {a, b} or servers[0] == servers[1] else servers
            return f"{ends[0]} to {ends[1]}"
    switch = meeting(cluster, a, b)
    assert switch is not None, "checked with the cluster"
    member = next(member for one, member in cluster.ports[a] if one == switch)
    return f"{member if switch.card is None else a} into {switch.name}"
