"""What each schedule costs beside what its paper says: idle time and live micro-batches, simulated and by formula.

    python -m benchmarks.schedules

Stages are alike, values move in no time, and F, I and W take 1 (B is 2). Times are of the device that is idle longest:
"idle" until the last device is done, "gap" between its own first and last action, which is how the zero bubble paper
counts, and "pairs" as idle with forward and backward overlapped in pairs of 3, as DualPipe's formula has it. Where
there are v stages on a device, each is a v-th of the size, and so are its times and what is live.

n devices, m micro-batches, v = 2 stages per device where there are several. "not said": the paper's formula is for
more micro-batches, or for a multiple of n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tabulate import tabulate

from fxpipe.schedules.make_schedule import make, placement

from .schedule_measures import bubble, gaps, idle, idle_in_pairs, peak_live

SIZES = ((2, 4), (4, 4), (4, 16), (4, 18), (8, 16), (8, 64))

Law = tuple[str, Callable[[int, int], int]]  # a formula, as text and of n and m


class Published(NamedTuple):
    """What the papers say of a schedule: its idle time, counted as one of the columns, and how many micro-batches are
    live on the device that has most; and for which n and m they say it."""

    column: str
    idle: Law
    live: Law
    said: Callable[[int, int], bool]


THREE: Law = "3(n-1)", lambda n, m: 3 * (n - 1)  # F + B of one stage for each device after the first
NONE: Law = "0", lambda n, m: 0


def _any(n: int, m: int) -> bool:
    return True


def _multiple(n: int, m: int) -> bool:
    return m % n == 0


def _enough(n: int, m: int) -> bool:
    return m >= 2 * n


PUBLISHED = {
    "gpipe": Published("idle", THREE, ("m", lambda n, m: m), _any),
    "1f1b": Published("idle", THREE, ("min(n, m)", lambda n, m: min(n, m)), _any),
    "1f1b-late": Published("idle", THREE, ("min(2n-1, m)", lambda n, m: min(2 * n - 1, m)), _any),
    "interleaved": Published("idle", THREE, ("vn", lambda n, m: 2 * n), _multiple),
    "interleaved-late": Published("idle", THREE, ("(v+1)n-1", lambda n, m: min(3 * n - 1, 2 * m)), _multiple),
    "looped-bfs": Published("idle", THREE, ("vm", lambda n, m: 2 * m), _any),
    "zb-h1": Published("gap", ("n-1", lambda n, m: n - 1), ("n", lambda n, m: n), _enough),
    "zb-h2": Published("gap", NONE, ("2n-1", lambda n, m: 2 * n - 1), _enough),
    "zb-v": Published("gap", NONE, ("2n", lambda n, m: 2 * n), _enough),
    "dualpipe-v": Published("pairs", ("2(n-1)", lambda n, m: 2 * (n - 1)), ("2n+1", lambda n, m: 2 * n + 1), _enough),
}

HEADERS = ("schedule", "n", "m", "bubble", "idle", "gap", "pairs", "published", "", "live", "published", "")


def line(name: str, n: int, m: int) -> tuple[object, ...]:
    """A line of the table."""
    published = PUBLISHED[name]
    schedule = make(name, placement(name, [f"cuda:{d}" for d in range(n)]), m)
    times = {"idle": max(idle(schedule)), "gap": max(gaps(schedule))}
    if published.column == "pairs" and published.said(n, m):
        times["pairs"] = max(idle_in_pairs(schedule.num_stages, m, pair=3))
    live, said = max(peak_live(schedule)), published.said(n, m)
    return (
        name, n, m, f"{bubble(schedule):.4f}", times["idle"], times["gap"], times.get("pairs", ""),
        *beside(times.get(published.column), published.idle, n, m, said),
        live, *beside(live, published.live, n, m, said),
    )  # fmt: skip


def beside(ours: float | None, law: Law, n: int, m: int, said: bool) -> tuple[str, str]:
    """The formula with its number, and whether ours is the same."""
    formula, of = law
    return f"{formula} = {of(n, m)}", ("same" if ours == of(n, m) else "differs") if said else "not said"


def rows() -> Iterator[tuple[object, ...]]:
    for name in PUBLISHED:
        for n, m in SIZES:
            yield line(name, n, m)


def main() -> None:
    print(tabulate(rows(), HEADERS, disable_numparse=True))


if __name__ == "__main__":
    main()
