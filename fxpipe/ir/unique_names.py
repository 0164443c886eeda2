"""Names for the values of a graph: identifiers, each used once."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable

# Names that generated code needs for itself. Of the builtins only those: `input` is what many call their argument.
OURS = ("F", "Tensor", "draw", "math", "nn", "operator", "self", "torch")
BUILTINS = ("bool", "complex", "dict", "float", "int", "len", "list", "max", "min", "range", "slice", "super", "tuple")
RESERVED = frozenset((*OURS, *BUILTINS, *keyword.kwlist, *keyword.softkwlist))


class Names:
    """Gives every name once.

    >>> names = Names()
    >>> names("batch['ids']"), names("encoder.0.weight"), names("lambda"), names("lambda"), names("0.bias")
    ('batch_ids', 'encoder_0_weight', 'lambda_', 'lambda_1', 'layer_0_bias')
    >>> names("x"), names("x"), names("x_1")
    ('x', 'x_1', 'x_2')
    """

    def __init__(self, used: Iterable[str] = ()) -> None:
        self.used = set(used)
        self.numbers: dict[str, int] = {}

    def __call__(self, wish: str) -> str:
        name = re.sub(r"\W+", "_", wish).strip("_") or "value"
        if name[0].isdigit():
            name = f"layer_{name}" if "." in wish else f"value_{name}"
        free = f"{name}_" if name in RESERVED else name
        base = re.sub(r"_\d+$", "", name)
        while free in self.used:
            self.numbers[base] = self.numbers.get(base, 0) + 1
            free = f"{base}_{self.numbers[base]}"
        self.used.add(free)
        return free
