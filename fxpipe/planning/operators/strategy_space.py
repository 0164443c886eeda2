"""The space of strategies that is searched: for each operator all degrees that divide the number of devices, and whose
product does, on any run of neighbouring devices.

A 2d convolution on 4 devices has 26 configs: 4 whole, 12 in two parts (4 dimensions, 3 runs of devices), and 10 in four
parts. Operators that are fed in are not placed.

The roles S, A and P are those of the SOAP paper, and its space is "SAP". "R" (for reduction) adds several holders of
each region: partial sums for operators that sum over a dimension, copies for the others.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from math import prod

from fxpipe.ir.operators.operators import Operator
from fxpipe.ir.operators.strategy import Config, fits


def fixed(operator: Operator) -> Config:
    """The config of an operator that is not placed: one that is fed in."""
    return Config((1,) * len(operator.output), (0,))


def place(operator: Operator, degrees: tuple[int, ...], first: int, holders: int = 1) -> Config:
    """The config with these degrees and holders, and its parts on neighbouring devices from `first` on."""
    return Config(degrees, tuple(range(first, first + prod(degrees) * holders)), holders)


@cache
def configs(operator: Operator, devices: int, roles: str = "SAP") -> tuple[Config, ...]:
    """Every config of an operator on this many devices, where dimensions of these roles may be cut."""
    if operator.kind == "input":
        return (fixed(operator),)
    divisors = [d for d in range(1, devices + 1) if devices % d == 0]
    choices = [
        [d for d in divisors if d <= one.size and fits(one, d)] if one.role and one.role in roles else [1]
        for one in operator.output
    ]
    choices.append([d for d in divisors if not 0 < operator.summed < d] if "R" in roles else [1])
    return tuple(
        place(operator, tuple(degrees), first, holders)
        for *degrees, holders in product(*choices)
        if devices % (prod(degrees) * holders) == 0
        for first in range(devices - prod(degrees) * holders + 1)
    )
