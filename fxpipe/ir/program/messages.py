"""The messages of a program, for engines of several processes: sender, receiver, name, and form (type and shape).

Nothing is negotiated at run time: the form of each message follows from the type of its value and the sizes of the
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxpipe.ir.dataclass_json import read, write
from fxpipe.ir.graph.value_types import Dim

from .device_programs import DevicePrograms, check
from .gradient_buckets import Bucket

HEAD = 64  # bytes of a message on CPUs before the elements, so that these are aligned


@dataclass(frozen=True)
class Form:
    """The form of a value: torch's name of its element type, and its shape. `number`: the type of a Python number."""

    dtype: str
    shape: tuple[Dim, ...] = ()
    number: str | None = None


@dataclass(frozen=True)
class LentTensor:
    """A tensor of the model that one stage lends to another.

    - `state`: its name; `home`: the stage that owns it; `user`: the stage that borrows it.
    - `path`: the path of a parameter or buffer in the home stage, or, if `constant`, the name of an attribute.
    - `borrowed`: its name in the borrower's code.
    """

    state: str
    home: int
    user: int
    path: str
    constant: bool
    borrowed: str


@dataclass(frozen=True)
class MessageTable:
    """The messages of a program, and the other data that ranks need to run it together.

    - `programs`: the steps of each device, in order.
    - `replica_groups`: the devices of each stage, one for each replica.
    - `names`: the name of each value in the generated code.
    - `forms`: the dtype and shape of each value that moves; `origins`: the user's line that made it.
    - `sizes`: the name, input and dimension of each number that shapes depend on; None: the input is the number.
    - `lent`: the tensors that stages lend.
    - `makers`: for each output of the model the stage that makes it, -1 if it is an input.
    - `buckets`: the gradient buckets.
    - `paths`: for each tensor in a bucket, its path in its stage, and whether it is a constant there.
    """

    programs: DevicePrograms
    replica_groups: tuple[tuple[str, ...], ...]
    names: Mapping[str, str]
    forms: Mapping[str, Form]
    origins: Mapping[str, str]
    sizes: tuple[tuple[str, str, int | None], ...]
    lent: tuple[LentTensor, ...]
    makers: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    paths: Mapping[str, tuple[str, bool]]


def dump(table: MessageTable) -> str:
    """The table as JSON text, with a line for each step of a device; `load` reads it back."""
    return write(table, 4)


def load(text: str) -> MessageTable:
    """The table that `dump` wrote. Raises ValueError if the text is not a table, or its programs cannot run."""
    table = read(MessageTable, text)
    check(table.programs)
    return table
