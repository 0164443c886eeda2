"""Keep what autograd saves in host memory, and have it back in time.

torch.autograd.graph.save_on_cpu copies on the stream that computes, which waits for each copy. Here the copies have a
stream of their own, and backward, which goes through the saved tensors in the opposite order, finds them on their way:

    compute   F ──────────────────▶            B: give k │ give k-1 │ give k-2
                │k-2 │k-1 │k                      ▲          ▲          ▲
    side        └out └out └out ─▶ host ─▶ in k ───┘ in k-1 ──┘ in k-2 ──┘

    side = offload(stage.device, without=stage.parameters())
    with side:                          # around each forward of the stage
        y = stage.forward(x)

A tensor that two ops save is moved twice. As with all such hooks autograd does not notice when a saved tensor is
written to afterwards; a model that it accepts without them does not do that.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fxpipe.runtime.streams import Stream, current_stream, new_stream, record_stream, use_stream, wait_stream

SMALL = 1 << 16  # bytes; a copy of less takes longer than it is worth


def offload(device: torch.device, without: Iterable[Tensor] = ()) -> Offload:
    """The hooks for a stage on this device; the memory of `without`, its parameters, stays."""
    if device.type != "cuda":
        raise ValueError(
            f"saved activations can be offloaded from a CUDA device to host memory, and this stage is on {device}: "
            "leave offload out there, or recompute instead with checkpoint="
        )
    return Offload(device, new_stream(device), without)


class Offload:
    """Moves what autograd saves while it is entered. Any number of times, by one thread at a time."""

    def __init__(self, device: torch.device, side: Stream, without: Iterable[Tensor] = (), small: int = SMALL) -> None:
        self.device, self.side, self.small = device, side, small
        self._storages = [x.untyped_storage() for x in without]  # alive: their numbers do not come again
        self._without = {storage._cdata for storage in self._storages}
        self._last: Moved | None = None

    def __enter__(self) -> Offload:
        self._last = None
        self._hooks = saved_tensors_hooks(self.pack, unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        self._last = None
        del self._hooks

    def pack(self, tensor: Tensor) -> Moved | Tensor:
        """The tensor on its way to the host, or itself where that is not worth it."""
        if not self.worth(tensor):
            return tensor.detach()
        self._last = Moved(tensor, self.side, self._last)
        return self._last

    def worth(self, tensor: Tensor) -> bool:
        return (
            tensor.device.type == self.device.type
            and tensor.layout == torch.strided
            and tensor.nbytes >= self.small
            and tensor.untyped_storage()._cdata not in self._without
        )


class Moved:
    """A tensor in host memory. `before` is the one that was saved before it, and will be asked for after it."""

    def __init__(self, tensor: Tensor, side: Stream, before: Moved | None) -> None:
        self.device, self.side, self.before = tensor.device, side, before
        wait_stream(side, current_stream(tensor.device))
        with use_stream(side):
            self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
            self.host.copy_(tensor.detach(), non_blocking=True)
            record_stream(tensor, side)
        self.here: Tensor | None = None

    def fetch(self) -> Tensor:
        """Start the copy back, unless it is under way. The side stream does it after the copy out."""
        if self.here is None:
            with use_stream(self.side):
                self.here = self.host.to(self.device, non_blocking=True, copy=True)
        return self.here

    def give(self) -> Tensor:
        """The tensor, for the current stream."""
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
