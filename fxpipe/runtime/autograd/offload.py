"""Keeps the tensors that autograd saves in host memory, and copies them back before backward needs them.

torch.autograd.graph.save_on_cpu copies on the compute stream, which waits for each copy. Here the copies have a stream
of their own, and backward, which needs the saved tensors in reverse order, prefetches the next one:

    compute   F ──────────────────▶            B: give k │ give k-1 │ give k-2
                │k-2 │k-1 │k                      ▲          ▲          ▲
    side        └out └out └out ─▶ host ─▶ in k ───┘ in k-1 ──┘ in k-2 ──┘

    side = offload(stage.device, without=stage.parameters())
    with side:                          # around each forward of the stage
        y = stage.forward(x)

A tensor that two ops save is moved twice. With such hooks autograd does not detect writes to saved tensors; a model
that runs without the hooks has no such writes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fxpipe.runtime.accelerator import has_streams
from fxpipe.runtime.streams import Stream, current_stream, new_stream, record_stream, use_stream, wait_stream
from fxpipe.torch_internals.tensor_memory import memory_key, storage_key

SMALL = 1 << 16  # bytes; to move a smaller tensor saves too little memory for its time


def offload(device: torch.device, without: Iterable[Tensor] = ()) -> Offload:
    """The hooks for a stage on `device`. Tensors in the memory of `without`, its parameters, are not moved. Raises
    ValueError if the device has no memory of its own, as the CPU."""
    if not has_streams(device):
        raise ValueError(
            f"saved activations can be offloaded from an accelerator to host memory, and this stage is on {device}: "
            "leave offload out there, or recompute instead with checkpoint="
        )
    return Offload(device, new_stream(device), without)


class Offload:
    """A context in which tensors that autograd saves are moved to the host. May be entered again and again, by one
    thread at a time."""

    def __init__(self, device: torch.device, side: Stream, without: Iterable[Tensor] = (), small: int = SMALL) -> None:
        self.device, self.side, self.small = device, side, small
        self._storages = [x.untyped_storage() for x in without]  # kept alive, so that their addresses stay unique
        self._without = {storage_key(storage) for storage in self._storages}
        self._last: Moved | None = None
        self._hooks: saved_tensors_hooks | None = None  # while the context is entered: they refer to this

    def __enter__(self) -> Offload:
        self._last = None
        self._hooks = saved_tensors_hooks(self.pack, unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(*error)
        self._last = self._hooks = None

    def pack(self, tensor: Tensor) -> Moved | Tensor:
        """Start the tensor's move to the host, or, if it is not worth moving, keep it."""
        if not self.worth(tensor):
            return tensor.detach()
        self._last = Moved(tensor, self.side, self._last)
        return self._last

    def worth(self, tensor: Tensor) -> bool:
        return (
            tensor.device.type == self.device.type
            and tensor.layout == torch.strided
            and tensor.nbytes >= self.small
            and memory_key(tensor) not in self._without
        )


class Moved:
    """A tensor in host memory. `before`: the one saved before it, which backward needs after it."""

    def __init__(self, tensor: Tensor, side: Stream, before: Moved | None) -> None:
        self.device, self.side, self.before = tensor.device, side, before
        wait_stream(side, current_stream(tensor.device))
        with use_stream(side):
            self.host = torch.empty_like(
                tensor, device="cpu", pin_memory=has_streams(tensor.device), requires_grad=False
            )
            self.host.copy_(tensor.detach(), non_blocking=True)
            record_stream(tensor, side)
        self.here: Tensor | None = None

    def fetch(self) -> Tensor:
        """Start the copy back, unless it has started. The side stream runs it after the copy to the host."""
        if self.here is None:
            with use_stream(self.side):
                self.here = self.host.to(self.device, non_blocking=True, copy=True)
        return self.here

    def give(self) -> Tensor:
        """The tensor, to be used on the current stream; starts the copy of the one before."""
        tensor, self.here = self.fetch(), None
        user = current_stream(self.device)
        wait_stream(user, self.side)
        record_stream(tensor, user)
        if self.before is not None:
            self.before.fetch()
            self.before = None
        return tensor


def unpack(saved: Moved | Tensor) -> Tensor:
    """The tensor on its device, for backward."""
    return saved.give() if isinstance(saved, Moved) else saved
