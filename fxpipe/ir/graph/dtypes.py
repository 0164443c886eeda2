"""Element types, in one table: our short names, as in XLA and JAX; torch's names; the bytes of an element. Nothing here
imports torch, so that planners can read types too."""

from __future__ import annotations

from typing import NamedTuple


class DType(NamedTuple):
    """What torch calls an element type, and its size in bytes."""

    torch: str
    size: int


DTYPES = {
    "f64": DType("float64", 8), "f32": DType("float32", 4), "f16": DType("float16", 2), "bf16": DType("bfloat16", 2),
    "f8_e4m3": DType("float8_e4m3fn", 1), "f8_e5m2": DType("float8_e5m2", 1),
    "i64": DType("int64", 8), "i32": DType("int32", 4), "i16": DType("int16", 2), "i8": DType("int8", 1),
    "u64": DType("uint64", 8), "u32": DType("uint32", 4), "u16": DType("uint16", 2), "u8": DType("uint8", 1),
    "bool": DType("bool", 1),
    "c128": DType("complex128", 16), "c64": DType("complex64", 8), "c32": DType("complex32", 4),
}  # fmt: skip
_SHORT = {f"torch.{dtype.torch}": name for name, dtype in DTYPES.items()}


def short_name(dtype: object) -> str:
    """Our name of a `torch.dtype`; for one that has none, torch's own.

    >>> import torch
    >>> short_name(torch.float32), short_name(torch.quint8)
    ('f32', 'torch.quint8')
    """
    return _SHORT.get(str(dtype), str(dtype))
