"""How the replicas of a stage share a micro-batch. The engines deal whole samples, as evenly as possible, the larger
shares first; with fewer samples than replicas the last replicas have none:

    5 samples    2 replicas   3 2
                 3 replicas   2 2 1
                 6 replicas   1 1 1 1 1 0
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import ceil

from .units import count


def dealt(samples: int, replicas: int) -> tuple[int, ...]:
    """The samples of each replica.

    >>> dealt(5, 3), dealt(2, 3)
    ((2, 2, 1), (1, 1, 0))
    """
    small, larger = divmod(samples, replicas)
    return (small + 1,) * larger + (small,) * (replicas - larger)


def largest_share(samples: int | None, replicas: int) -> float:
    """The share of a micro-batch that the first replica has, which has the most: an ideal one if `samples` is None.

    >>> largest_share(5, 2), largest_share(None, 2)
    (0.6, 0.5)
    """
    return 1 / replicas if samples is None else -(-samples // replicas) / samples


def fewest(samples: int | None, share: float) -> int:
    """The least replicas of which none has more than this share of a micro-batch; 0 if there are none such.

    >>> fewest(5, 0.5), fewest(None, 0.5), fewest(5, 0.1)
    (3, 2, 0)
    """
    if samples is None:
        return ceil(1 / share) if share > 0 else 0
    each = int(share * samples)
    return -(-samples // each) if each > 0 else 0


def uneven(samples: int, replicas: int) -> str:
    """A text on shares that differ; "" if all replicas have as many samples.

    >>> uneven(5, 3), uneven(1, 3), uneven(6, 3)
    ('2 of 5 samples on 2 replicas, 1 on 1', '1 of 1 sample on 1 replica, 0 on 2', '')
    """
    small, larger = divmod(samples, replicas)
    if not larger:
        return ""
    among = f"{count(samples, 'sample', 'samples')} on {count(larger, 'replica', 'replicas')}"
    return f"{small + 1} of {among}, {small} on {replicas - larger}"


def in_common(samples: int, senders: int, receivers: int) -> Iterator[tuple[int, int, int]]:
    """(sender, receiver, samples that both have), for all pairs that have some, if both groups share the same samples.

    >>> list(in_common(5, 2, 3))
    [(0, 0, 2), (0, 1, 1), (1, 1, 1), (1, 2, 1)]
    """
    ours, theirs = (tuple(accumulate(dealt(samples, n))) for n in (senders, receivers))
    i = j = at = 0
    while at < samples:
        end = min(ours[i], theirs[j])
        yield i, j, end - at
        i, j, at = i + (end == ours[i]), j + (end == theirs[j]), end
