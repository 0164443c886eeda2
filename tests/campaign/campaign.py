"""A campaign: workers try models, what fails is made smaller and written down, and all is counted."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import one, shrink
from .setting import Run
from .tally import Tally
from .trial import Outcome
from .workers import RANKS, Workers

EVERY = 300.0  # seconds between two tables


def campaign(seed: int, jobs: int, out: Path, todo: Iterator[int], *, log: bool = True) -> Tally:
    """Try the models with these indices. Scripts of what fails are in `out`, beside the table."""
    out.mkdir(parents=True, exist_ok=True)
    tally, start, told = Tally(), time.monotonic(), time.monotonic()
    bad: dict[int, Outcome] = {}
    compared: dict[int, int] = defaultdict(int)
    for index, what, more in Workers(seed, jobs, out, todo).reports():
        tally.counts["seconds"] = int(time.monotonic() - start)
        if what == "outcome":
            found = more if isinstance(more, Outcome) else Outcome("internal", 0, Run("call", 0), str(more))
            tally.outcome(index, found)
            compared[index] += found.what in ("same", "fault")
            if found.bad:
                bad.setdefault(index, found)
        elif what == "done":
            tally.counts["models" if more and compared[index] else "none"] += 1
            if more:
                tally.settings(more.settings)
        else:
            tally.counts[what] += 1
            bad[index] = Outcome(what, 0, Run("call", 0), str(more))
        if what != "outcome" and index in bad:
            name = write(seed, index, more if what == "done" else None, bad[index], out)
            if log:
                print(f"model {index}: {bad[index].what}, see {name}", flush=True)
        if time.monotonic() - told > EVERY:
            told = time.monotonic()
            (out / "table.txt").write_text(tally.table() + "\n")
    (out / "table.txt").write_text(tally.table() + "\n")
    return tally


def write(seed: int, index: int, subject: Any, bad: Outcome, out: Path) -> Path:
    """A script of what has failed, made smaller."""
    if subject is None:  # it hung, or died
        with TemporaryDirectory() as folder:
            subject = one.drawn(seed, index, Path(folder), ranks=RANKS)
    path = out / f"{bad.what.replace(' ', '-')}-{seed}-{index}.py"
    title = f"Model {index} of campaign {seed}: {bad.what}."
    path.write_text(shrink.script(subject, bad, title))  # as it is: making it smaller may be cut short
    small = shrink.smaller(subject, bad)
    path.write_text(shrink.script(small, bad, title))
    (out / f"{path.stem}.txt").write_text(bad.text + "\n")
    return path
