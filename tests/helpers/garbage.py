"""How often Python collects garbage while tests run."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """Less often than Python would by itself, which with a million objects takes a tenth of the time; and never among
    what is there now, as PyTorch's modules and the collected tests, which stays."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def collect_once() -> None:
    """Collect now, and never again among what is left, as what PyTorch has compiled: later collections look at less."""
    gc.collect()
    gc.freeze()
