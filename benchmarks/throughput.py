"""How much faster two CPU workers train than one, when there is nothing but arithmetic to do.

    python -m benchmarks.throughput

Two equal stages of large matrices, sixteen micro-batches, one thread for each stage. Of 2M thread-times of work, M + 1
pass by the clock if nothing is lost: the ideal is 2M / (M + 1) over the plain loop. "no pipeline" says what two cores
of the machine give at that moment, of 2. All run in turn, and those in other processes sleep until it is theirs. Loss
and gradients are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

import torch
from tabulate import tabulate

from benchmarks.timing import in_turn
from benchmarks.trainers import PLAIN, check, compiled_trainers, trainers
from benchmarks.workload import Workload

WORK = Workload(stages=2, chunks=16, rows=128, width=512, depth=8)  # a stage takes a micro-batch about 20 ms


def measure(
    work: Workload, rounds: int, steps: int, only: Sequence[str] = (), compiled: bool = False
) -> dict[str, list[float]]:
    """Seconds per step of each trainer, one number per round; `only` keeps those whose names have one of these words,
    and the plain loop. `compiled`: also those whose stages are compiled."""
    made = {
        name: make()
        for name, make in (trainers(work) | (compiled_trainers(work) if compiled else {})).items()
        if not only or name == PLAIN or any(word in name for word in only)
    }
    try:
        check(made)
        runs = {name: partial(one.run, steps) for name, one in made.items()}
        seconds = in_turn(runs, rounds, steps=1, tidy=[one.tidy for one in made.values()])
    finally:
        for one in made.values():
            one.close()
    return {name: [time / steps for time in times] for name, times in seconds.items()}


def ideal(work: Workload) -> float:
    """How much faster than the plain loop a pipeline can be.

    >>> round(ideal(WORK), 2)
    1.88
    """
    return work.stages * work.chunks / (work.chunks + work.stages - 1)


def table(work: Workload, seconds: Mapping[str, list[float]]) -> str:
    """Milliseconds a step, how often faster than the plain loop in the same round, and that as a part of the ideal."""
    rows = []
    for name, times in seconds.items():
        faster = median(plain / ours for plain, ours in zip(seconds[PLAIN], times, strict=True))
        part = "" if name == PLAIN else f"{faster / ideal(work):.1%}"
        rows.append((name, f"{median(times) * 1e3:.1f}", f"{faster:.2f}", part))
    headers = ("", "ms per step", "times the plain loop", f"of the ideal {ideal(work):.2f}")
    return tabulate(rows, headers, colalign=("left", "right", "right", "right"), disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps on two CPU workers, beside the plain loop and peers.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="training steps of each trainer in a round")
    parser.add_argument("--only", nargs="+", default=(), help="words of the trainers to run beside the plain loop")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(table(WORK, measure(WORK, options.rounds, options.steps, options.only)))


if __name__ == "__main__":
    main()
