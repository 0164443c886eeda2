"""Timing that a busy machine cannot fool much: candidates take turns, and medians of the same rounds are compared."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from time import perf_counter

from tqdm import tqdm


def in_turn(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    steps: int,
    tidy: Iterable[Callable[[], object]] = (),
) -> dict[str, list[float]]:
    """Seconds per step of each candidate, one number per round; every round runs each of them `steps` times. Garbage is
    collected between rounds, also by those who `tidy` elsewhere."""
    tidy = (gc.collect, *tidy)
    for candidate in candidates.values():
        for _ in range(steps):
            candidate()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for collect in tidy:
        collect()
    gc.disable()
    try:
        for _ in tqdm(range(rounds), desc="rounds", leave=False):
            for name, candidate in candidates.items():
                start = perf_counter()
                for _ in range(steps):
                    candidate()
                seconds[name].append((perf_counter() - start) / steps)
            for collect in tidy:
                collect()
    finally:
        gc.enable()
    return seconds


def median_difference(times: list[float], base: list[float]) -> float:
    """The median over rounds of how much longer `times` are than `base`."""
    return median(a - b for a, b in zip(times, base, strict=True))
