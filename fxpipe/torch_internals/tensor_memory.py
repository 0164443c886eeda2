"""Which memory a tensor has, who else has it, and how often it has been written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .capability import Capability

STORAGE_KEY = Capability(
    what="a number for each storage, also for one without memory",
    names=("torch.UntypedStorage._cdata",),
    since="2.0",
    without="fxpipe refuses to run: nothing tells which tensors share memory",
    check=lambda: isinstance(torch.empty(1).untyped_storage()._cdata, int),
    needed=True,
)
USE_COUNT = Capability(
    what="how many hold a storage",
    names=("torch._C._storage_Use_Count",),
    since="2.1",
    without="each first gradient of a parameter is copied, as if others had its memory",
)
COPY_ALL = Capability(
    what="copy several tensors in one launch",
    names=("torch._foreach_copy_",),
    since="2.2",
    without="each is copied by itself",
)


def copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values into other memory of the same sizes."""
    if COPY_ALL.there:
        torch._foreach_copy_(into, values)  # type: ignore[arg-type]
    else:
        for one, value in zip(into, values, strict=True):
            one.copy_(value)


def storage_key(tensor: Tensor) -> int:
    """A number that two living tensors have in common if and only if they have the same storage. Raises FxpipeError."""
    STORAGE_KEY.need("fxpipe")
    return int(tensor.untyped_storage()._cdata)


def is_shared(tensor: Tensor) -> bool:
    """Whether another tensor may have the same memory: the storage counts the tensor, its Python object, and others."""
    return not USE_COUNT.there or bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2)
