"""How operators are cut and where their parts are, as a table.

operator  kind    S  A         P  devices
conv1     conv2d  2  height/2     0-3
fc6       linear               4  0-3
fc7       linear                  2
S, A, P: parts along dimensions of ...

Where regions have several holders, another column says which and how many: `summed/4` or `copies/2`. Where operators
are recomputed, another says which.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from tabulate import tabulate

from fxpipe.ir.operators.operators import Operator
from fxpipe.ir.operators.strategy import Config, shared

LEGEND = "S, A, P: parts along dimensions of samples, of attributes (height, length) and of parameters (channels)"


def table(cuts: Iterable[tuple[Operator, Config]], recomputed: Container[str] = ()) -> str:
    """How each operator is cut in its sample, attribute and parameter dimensions (S, A, P), its devices, and whether it
    is among the `recomputed` ones. Steps of a layer that are alike in all this are one row."""
    alike: dict[tuple[str, Config, bool], list[Operator]] = {}
    for operator, config in cuts:
        if operator.kind != "input":
            key = operator.weight_group or operator.name, config, operator.name in recomputed
            alike.setdefault(key, []).append(operator)
    several = any(config.holders > 1 for _, config, _ in alike)
    some = any(again for _, _, again in alike)
    rows = [
        (
            steps[0].name + (f" and {len(steps) - 1} more" if len(steps) > 1 else ""),
            steps[0].kind,
            *(_cut(steps[0], config, role) for role in "SAP"),
            *([f"{shared(steps[0])}/{config.holders}" if config.holders > 1 else ""] if several else ()),
            _run(config.devices),
            *(["yes" if again else ""] if some else ()),
        )
        for (_, config, again), steps in alike.items()
    ]
    columns = (*(["holders"] if several else ()), "devices", *(["recomputed"] if some else ()))
    headers = ("operator", "kind", "S", "A", "P", *columns)
    lines = tabulate(rows, headers, tablefmt="plain", disable_numparse=True).splitlines()
    return "\n".join([*(line.rstrip() for line in lines), LEGEND])


def _cut(operator: Operator, config: Config, role: str) -> str:
    """The degrees of the dimensions of one role, with names where an operator has several such dimensions."""
    there = [(d, n) for d, n in zip(operator.output, config.degrees, strict=True) if d.role == role]
    return " ".join(f"{n}" if len(there) == 1 else f"{d.name}/{n}" for d, n in there if n > 1)


def _run(devices: Sequence[int]) -> str:
    """Devices by number; a run of them as `0-3`.

    >>> _run((4, 5, 6, 7)), _run((0, 2)), _run((3,))
    ('4-7', '0 2', '3')
    """
    if len(devices) > 2 and tuple(devices) == tuple(range(devices[0], devices[0] + len(devices))):
        return f"{devices[0]}-{devices[-1]}"
    return " ".join(map(str, devices))
