"""Counts the bytes that autograd keeps between forward and backward, and can free them early.

Process memory and allocator statistics include parameters, gradients and fragments, and the CPU has no such statistics.
But autograd calls a hook for each tensor that it saves, and the object that the hook returns, a `Kept`, lives as long
as autograd needs the tensor. So the count is exact: each storage once, from when it is first saved until it is last
needed.

    saved = Saved(without=stage.parameters())
    with saved:                       # around each forward of the stage
        y = stage.forward(x)
    saved.now, saved.peak

Hooks are per thread, and if they are nested only the inner ones are called. With hooks autograd does not detect writes
to a saved tensor, so `Kept` checks for them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, saved_tensors_hooks

from fxpipe.torch_internals.autograd_nodes import current_node
from fxpipe.torch_internals.tensor_memory import sparse_parts, storage_key, version_of

Memory = tuple[int, int]  # the address of a storage, unique among those alive, and its bytes
Place = tuple[int, int]  # a storage, and the offset of a piece of a batch in it, else 0


class Saved:
    """Counts the bytes kept: `now`, and `peak`, the maximum so far. Memory of the tensors in `without` does not count.
    Of the memory of a batch, only its `pieces` count, the micro-batches, each by itself. May be entered again and
    again, by one thread at a time."""

    def __init__(self, without: Iterable[Tensor] = (), pieces: Iterable[Tensor] = ()) -> None:
        self._storages = [x.untyped_storage() for x in without]  # kept alive, so that their addresses stay unique
        self._without = {storage_key(storage) for storage in self._storages}
        self._pieces: dict[int, list[tuple[int, int]]] = {}  # where each begins in its storage, and its bytes
        for piece in pieces:
            storage = piece.untyped_storage()
            if piece.nbytes < storage.nbytes():
                self._storages.append(storage)
                self._pieces.setdefault(storage_key(storage), []).append((int(piece.storage_offset()), piece.nbytes))
        for begins in self._pieces.values():
            begins.sort()
        self._users: dict[Place, int] = {}
        self._kept: dict[ref[Kept], list[tuple[Place, int]]] = {}
        self._gone: deque[ref[Kept]] = deque()  # any thread that frees a tensor appends to it
        self._now = 0
        self._border: Collection[Node] | None = None
        self._hooks: saved_tensors_hooks | None = None  # while the context is entered: they refer to this
        self.peak = 0

    @property
    def now(self) -> int:
        """The bytes kept at present."""
        while self._gone:
            for number, size in self._kept.pop(self._gone.popleft(), ()):
                self._users[number] -= 1
                if not self._users[number]:
                    del self._users[number]
                    self._now -= size
        return self._now

    def __enter__(self) -> Saved:
        self._hooks = saved_tensors_hooks(self.keep, self.give)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(*error)
        self._hooks = None

    def keep(self, tensor: Tensor) -> Kept:
        """Counts the tensor for as long as the result lives. Autograd's hook; call it directly for tensors that are
        kept elsewhere."""
        memories = [self._piece(tensor, *memory) for memory in memories_of(tensor) if memory[0] not in self._without]
        now = self.now
        for number, size in memories:
            if number not in self._users:
                now += size
            self._users[number] = self._users.get(number, 0) + 1
        self._now = now
        self.peak = max(self.peak, now)
        # Not __del__: Python runs signal handlers when a Python function begins, and an exception in __del__, such as
        # that of Ctrl-C, is lost. `append` is written in C.
        kept = Kept(tensor, self._gone.append)
        self._kept[kept.ref] = memories
        return kept

    def _piece(self, tensor: Tensor, storage: int, size: int) -> tuple[Place, int]:
        """The memory that counts for a tensor in a storage: all of it, or the piece of a batch."""
        begins = self._pieces.get(storage)
        if begins is None:
            return (storage, 0), size
        offset, size = begins[max(0, bisect_right(begins, tensor.storage_offset(), key=lambda piece: piece[0]) - 1)]
        return (storage, offset), size

    def give(self, kept: Kept) -> Tensor:
        """The tensor, for backward."""
        tensor = kept.give()
        if self._border is not None:
            node = current_node()
            if node is not None and node not in self._border and not isinstance(node, BackwardCFunction):
                kept.tensor = None
                self._gone.append(kept.ref)
        return tensor

    @contextmanager
    def letting_go(self, border: Collection[Node]) -> Iterator[None]:
        """In this context backward frees the saved tensors of a node after their use. Nodes in `border` run again, and
        nodes written in Python may read their tensors twice, so both keep theirs."""
        self._border = border
        try:
            yield
        finally:
            self._border = None


class Kept:
    """Stands in for a tensor that autograd saves. `gone` is called with `ref` once this is not needed any more."""

    __slots__ = ("__weakref__", "ref", "tensor", "version")

    def __init__(self, tensor: Tensor, gone: Callable[[ref[Kept]], object]) -> None:
        self.tensor: Tensor | None = tensor.detach()  # else an output and its node would keep each other alive
        self.version = version_of(self.tensor)
        self.ref = ref(self, gone)

    def give(self) -> Tensor:
        if self.tensor is None:
            raise RuntimeError("backward ran a second time through nodes that have let go of their saved tensors")
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {self.tensor.type()} {list(self.tensor.shape)} is at version {version_of(self.tensor)}; "
                f"expected version {self.version} instead"
            )
        return self.tensor


def memories_of(tensor: Any) -> list[Memory]:
    """The storages of the tensor: one, or several for a sparse tensor."""
    if tensor.layout == torch.sparse_coo:
        return [memory for part in sparse_parts(tensor) for memory in memories_of(part)]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return [memory for part in parts for memory in memories_of(part)]
    storage = tensor.untyped_storage()
    return [(storage_key(storage), storage.nbytes())]
