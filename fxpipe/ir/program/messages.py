"""What an engine of several processes must know of a program: who sends what to whom, by which name and in what form.

Here nothing is negotiated at run time: the forms of all messages follow from the types of the values and the sizes of
the batch at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxpipe.ir.dataclass_json import read, write
from fxpipe.ir.graph.value_types import Dim

from .device_programs import DevicePrograms, check
from .gradient_buckets import Bucket


@dataclass(frozen=True)
class Form:
    """A tensor's element type, by torch's name for it, and its shape. A Python number has `number`, its type."""

    dtype: str
    shape: tuple[Dim, ...] = ()
    number: str | None = None


@dataclass(frozen=True)
class LentTensor:
    """A tensor of the model that stage `home` lends to stage `user`: where it hangs in the stage, by the path of a
    parameter or buffer or as an attribute that holds a constant, and what the borrower's code calls it."""

    state: str
    home: int
    user: int
    path: str
    constant: bool
    borrowed: str


@dataclass(frozen=True)
class MessageTable:
    """The messages of a program, and what else ranks have to know of it to run it together.

    - `programs`: what each device does, in order.
    - `replica_groups`: the devices of each stage, one for each replica.
    - `names`: what the generated code calls each value.
    - `forms`: the dtype and shape of each value that moves; `origins`: the user's line that made it.
    - `sizes`: the name, input and dimension of each number that shapes depend on.
    - `lent`: tensors of one stage that others use.
    - `makers`: for each output of the model the stage that makes it, -1 where it is an input.
    - `buckets`: the gradients that replicas add up together.
    - `paths`: for each tensor in a bucket, its path in its stage, and whether it is a constant there.
    """

    programs: DevicePrograms
    replica_groups: tuple[tuple[str, ...], ...]
    names: Mapping[str, str]
    forms: Mapping[str, Form]
    origins: Mapping[str, str]
    sizes: tuple[tuple[str, str, int], ...]
    lent: tuple[LentTensor, ...]
    makers: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    paths: Mapping[str, tuple[str, bool]]


def dump(table: MessageTable) -> str:
    """The table as JSON text, a line for each step of a device; `load` reads it back."""
    return write(table, 4)


def load(text: str) -> MessageTable:
    """The table that `dump` wrote. Raises ValueError for text that is none, or whose steps cannot run."""
    table = read(MessageTable, text)
    check(table.programs)
    return table
