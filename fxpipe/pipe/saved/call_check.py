"""Whether a call is of the kind that a package was saved for.

    INPUTS = (("x", ("b", "x_1", 6), "float32"), ("scale", "float"))     in the files
    x: float32[8, 4, 6], scale: 0.5                                      a call

Numbers are fixed sizes. Names are sizes that may vary, but a name is the same size at all its places; `b` is the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from fxpipe.errors import InputError
from fxpipe.ir.graph.value_types import dim_size
from fxpipe.runtime.microbatch import split_sizes

BATCH = "b"


def check_call(package: ModuleType, values: Sequence[Any]) -> None:
    """Raise InputError, which says what the package was saved for, if the inputs of a call do not fit it."""
    sizes: dict[str, Any] = {}
    for row, value in zip(package.INPUTS, values, strict=True):
        if len(row) == 3:
            _sizes_of(row, value, sizes)
        elif type(value).__name__ != row[1]:
            raise InputError(f"{row[0]} is {value!r}, and this package was saved for a number of the type {row[1]}")
        else:
            sizes[row[0]] = value
    for row, value in zip(package.INPUTS, values, strict=True):
        if len(row) == 3 and any(dim_size(want, sizes) != size for want, size in zip(row[1], value.shape, strict=True)):
            raise _refused(row, value)
    conditions: Callable[..., Mapping[str, bool]] | None = getattr(package, "conditions", None)
    if conditions is not None:
        for rows in sorted(set(split_sizes(sizes.get(BATCH, 1), package.CHUNKS))):
            now = sizes | {BATCH: rows}
            _check_conditions(conditions, now)


def _sizes_of(row: tuple[Any, ...], value: Any, sizes: dict[str, Any]) -> None:
    """Store in `sizes` the sizes in a tensor's shape. Raises InputError if `value` is no tensor of the saved type."""
    _, shape, dtype = row
    if not isinstance(value, Tensor) or str(value.dtype) != f"torch.{dtype}" or value.dim() != len(shape):
        raise _refused(row, value)
    for want, size in zip(shape, value.shape, strict=True):
        if isinstance(want, str) and want.isidentifier():
            sizes.setdefault(want, size)


def _check_conditions(conditions: Callable[..., Mapping[str, bool]], sizes: Mapping[str, Any]) -> None:
    code: Any = conditions
    names = code.__code__.co_varnames[: code.__code__.co_argcount]
    for text, holds in conditions(*(sizes[name] for name in names)).items():
        if not holds:
            what = ", ".join(f"{name} = {sizes[name]}" for name in names)
            batch = "; b is the size of a micro-batch" if BATCH in names else ""
            raise InputError(
                f"this package was saved for calls with {text}, and here {what}{batch}; save one for these"
            )


def _refused(row: tuple[Any, ...], value: Any) -> InputError:
    name, shape, dtype = row
    found = (
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    )
    return InputError(
        f"{name} is {found}, and this package was saved for {dtype}[{', '.join(map(str, shape))}]; save another one "
        "after a call like this"
    )
