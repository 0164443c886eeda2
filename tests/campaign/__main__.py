"""The command: `python -m tests.campaign --hours 1 --seed 7 --jobs 2 --out campaign-7`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch, which reads it once


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0, help="for how long models are made")
    parser.add_argument("--models", type=int, help="how many models, at most")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
    parser.add_argument("--only", type=int, help="the number of the one model to try")
    parser.add_argument("--jobs", type=int, default=1, help="processes that try models")
    parser.add_argument("--out", type=Path, help="a folder for scripts of what fails, and for the table")
    parser.add_argument("--script", type=Path, help="run a script that a campaign has written, and nothing else")
    asked = parser.parse_args()
    if asked.script:
        from .script import main as replay

        return replay(str(asked.script))
    from .campaign import campaign

    end = time.monotonic() + asked.hours * 3600

    def todo() -> Iterator[int]:
        for index in [asked.only] if asked.only is not None else count():
            if time.monotonic() > end or (asked.models is not None and index >= asked.models):
                return
            yield index

    tally = campaign(asked.seed, asked.jobs, asked.out or Path(f"campaign-{asked.seed}"), todo())
    print(tally.table())
    return int(tally.bad > 0)


if __name__ == "__main__":
    sys.exit(main())
