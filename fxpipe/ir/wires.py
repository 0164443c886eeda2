"""What an engine of several processes must know of a program: who sends what to whom, by which name and in what form.

Here nothing is negotiated at run time: the forms of all messages follow from the types of the values and the sizes of
the batch at hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .buckets import Bucket
from .device_programs import DevicePrograms, Message, Step, check
from .schedule import Action
from .types import Dim


@dataclass(frozen=True)
class Form:
    """A tensor's element type, by torch's name for it, and its shape. A Python number has `number`, its type."""

    dtype: str
    shape: tuple[Dim, ...] = ()
    number: str | None = None


@dataclass(frozen=True)
class Lent:
    """A tensor of the model that stage `home` lends to stage `user`: where it hangs in the stage, by the path of a
    parameter or buffer or as an attribute that holds a constant, and what the borrower's code calls it."""

    state: str
    home: int
    user: int
    path: str
    constant: bool
    borrowed: str


@dataclass(frozen=True)
class Wires:
    """`programs`: what each device does, in order; `crews`: the devices of each stage, one for each replica; `names`:
    what the code calls each value; `forms`: of all that moves; `origins`: the user's line that made it; `sizes`: the
    name, input and dimension of each number that shapes depend on; `makers`: of each output of the model, the stage
    that makes it, -1 where it is an input; `buckets`: of the gradients that replicas add up, and `paths`: by which the
    tensors in these hang in their stages, and whether that is as a constant."""

    programs: DevicePrograms
    crews: tuple[tuple[str, ...], ...]
    names: Mapping[str, str]
    forms: Mapping[str, Form]
    origins: Mapping[str, str]
    sizes: tuple[tuple[str, str, int], ...]
    lent: tuple[Lent, ...]
    makers: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    paths: Mapping[str, tuple[str, bool]]


def dump(wires: Wires) -> str:
    """The wires as JSON text, a line for each step of a device; `load` reads it back."""
    data: dict[str, Any] = asdict(wires)
    rows = [",\n   ".join(map(json.dumps, row)) for row in data["programs"].pop("rows")]
    body = "\n  ],\n  [\n   ".join(rows)
    return f'{json.dumps(data).removesuffix("}")},\n "rows": [\n  [\n   {body}\n  ]\n ]\n}}\n'


def load(text: str) -> Wires:
    """The wires that `dump` wrote. Raises ValueError for text that is none, or whose steps cannot run."""
    try:
        data = json.loads(text)
        rows = tuple(tuple(_step(*step) for step in row) for row in data.pop("rows"))
        programs = DevicePrograms(data["programs"]["name"], tuple(data["programs"]["devices"]), rows)
        forms = {name: Form(**one | {"shape": tuple(one["shape"])}) for name, one in data["forms"].items()}
        tuples = {name: tuple(map(tuple, data[name])) for name in ("crews", "sizes")} | {
            "makers": tuple(data["makers"])
        }
        paths = {name: tuple(path) for name, path in data["paths"].items()}
        lent, buckets = tuple(Lent(**one) for one in data["lent"]), tuple(map(_bucket, data["buckets"]))
        own = {"programs": programs, "forms": forms, "lent": lent, "buckets": buckets, "paths": paths}
        found = Wires(**data | tuples | own)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not what moves between the stages of a package: {error!r}") from None
    check(programs)
    return found


def _bucket(data: dict[str, Any]) -> Bucket:
    return Bucket(**data | {"tensors": tuple((name, tuple(shape)) for name, shape in data["tensors"])})


def _step(do: str, what: list[Any]) -> Step:
    if do == "run":
        return Step(do, Action(*what))
    *message, (sender, receiver) = what
    return Step(do, Message._make([*message, (sender, receiver)]))
