"""Numbers that Dynamo takes from tensors of no dimension before a trace begins.

For `int(self.count)` it would look at the tensor that is there while it traces. Where that has no values of its own, as
what stands for a parameter, what is traced would be for another number, and no guard would notice it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fxpipe.torch_internals.capability import Capability

from .patched import patched

REMEMBERED_ITEMS = Capability(
    what="the conversion of tensors for a trace",
    names=(
        "torch._subclasses.fake_tensor.FakeTensorConverter.from_real_tensor",
        "torch._subclasses.fake_tensor.SymNumberMemoDescriptor",
    ),
    since="2.4",
    without="nothing is captured: a graph might be for other numbers than those of the model",
)


@contextmanager
def no_items_of(has_no_values: Callable[[Tensor], bool]) -> Iterator[None]:
    """A context in which a trace depends on data where it asks for the item of such a tensor."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter

    converting = FakeTensorConverter.from_real_tensor

    def from_real_tensor(self: Any, mode: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = converting(self, mode, tensor, *args, **kwargs)
        if isinstance(made, FakeTensor) and has_no_values(tensor):
            made.item_memo = None
        return made

    with patched(FakeTensorConverter, from_real_tensor=from_real_tensor):
        yield
