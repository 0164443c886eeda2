"""What the scripts have in common: how they say what they need and what they found."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec


def need(library: str, *others: str) -> None:
    """End the script if a library is not installed; `others` are to be installed with it."""
    if find_spec(library) is None:
        raise SystemExit(f"{library} is not installed: pip install {' '.join((library, *others))}")


def show(name: str, losses: Sequence[float]) -> None:
    print(name, *(f"{loss:.4f}" for loss in losses))
