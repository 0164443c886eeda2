"""How numbers are written: well-known limits by name, and computed numbers as the formula behind them.

A captured graph has 0.35355339059327373 where the model says `head_dim ** -0.5`. The formula is written only if it
gives the very same number, to the last bit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache

import torch

KNOWN_DIGITS = 8  # a number with more of them came out of a computation

# Masks are filled with them.
LIMITS = {
    getattr(torch.finfo(dtype), end): f"torch.finfo({dtype}).{end}"
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for end in ("min", "max")
}
# Of angles, and of the tanh that stands for a GELU.
FORMULAS = {
    math.pi: "math.pi",
    2 * math.pi: "(2 * math.pi)",
    math.pi / 2: "(math.pi / 2)",
    math.sqrt(2 / math.pi): "math.sqrt(2 / math.pi)",
}
BASE = 10000  # of the wave lengths of position embeddings: "Attention Is All You Need", section 3.5
MOST = 1 << 20  # integers beyond this explain nothing


def number(value: float) -> str:
    """The source of a float.

    >>> number(0.5), number(8**-0.5), number(math.log(10000) / 63), number(-1e30), number(float("inf"))
    ('0.5', '8**-0.5', '(math.log(10000) / 63)', '-1e30', 'float("inf")')
    """
    if value in LIMITS:
        return LIMITS[value]
    if not math.isfinite(value):
        return f'float("{float.__repr__(value)}")'
    text = float.__repr__(value).replace("e+", "e")
    if sum(map(str.isdigit, text)) <= KNOWN_DIGITS:
        return text
    found = formula(abs(value))
    return text if found is None else f"-{found}" if value < 0 else found


def module_of(value: float) -> str:
    """The module that the source of a float needs, "" for none."""
    found = re.search(r"\b(math|torch)\.", number(value))
    return found[1] if found else ""


@lru_cache(maxsize=1024)
def formula(value: float) -> str | None:
    """A short formula that gives exactly this positive number, or None. It needs no parentheses beside any operator
    except `**`."""
    return next((text for made, text in _formulas(value) if made == value), None)


def _formulas(value: float) -> Iterator[tuple[float, str]]:
    """Numbers nearby, each with its source."""
    yield from FORMULAS.items()
    if 1 / MOST < value < MOST:
        parts = round(1 / value)
        if 1 < parts < MOST:
            yield 1 / parts, f"(1 / {parts})"
        square, inverse = round(value**2), round(value**-2)
        if 1 < square < MOST:
            yield square**0.5, f"{square}**0.5"
        if 1 < inverse < MOST:
            yield inverse**-0.5, f"{inverse}**-0.5"
        if value < math.log(MOST):
            power = round(math.exp(value))
            yield math.log(power), f"math.log({power})"
        steps = round(math.log(BASE) / value)
        if 0 < steps < MOST:
            yield math.log(BASE) / steps, f"(math.log({BASE}) / {steps})"
