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
TENSOR_FACTS = Capability(
    what="how often a tensor has been written, whether it is a view, and its hooks",
    names=(
        "torch.Tensor._version",
        "torch.Tensor._is_view",
        "torch.Tensor._is_zerotensor",
        "torch.Tensor._indices",
        "torch.Tensor._values",
        "torch.Tensor._backward_hooks",
    ),
    since="1.13",
    without="fxpipe refuses to run: nothing tells what forward has written",
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


def storage_key(storage: torch.UntypedStorage) -> int:
    """A number of a living storage, which no other has."""
    return int(storage._cdata)


def memory_key(tensor: Tensor) -> int:
    """A number that two living tensors have in common if and only if they have the same storage."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    """A number that changes when the tensor is written in place; tensors made in inference mode have none: 0."""
    return 0 if tensor.is_inference() else int(tensor._version)


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another one."""
    return bool(tensor._is_view())


def is_zero_tensor(tensor: Tensor) -> bool:
    """Whether the tensor stands for zeros without having memory."""
    return bool(tensor._is_zerotensor())


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The indices and values of a sparse tensor, also of one that has several values at an index."""
    return tensor._indices(), tensor._values()


def has_hooks(tensor: Tensor) -> bool:
    """Whether somebody has hung a hook on the tensor that sees its gradient."""
    return bool(tensor._backward_hooks)


def has_late_hooks(tensor: Tensor) -> bool:
    """Whether somebody has hung a hook on the tensor that runs when its gradient is complete."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def is_shared(tensor: Tensor) -> bool:
    """Whether another tensor may have the same memory: the storage counts the tensor, its Python object, and others."""
    return not USE_COUNT.there or bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2)
