"""Work of a GPU that is given to it to measure something."""

from __future__ import annotations

import torch

from .capability import Capability

BUSY = Capability(
    what="keep a GPU busy for a number of its clock cycles",
    names=("torch.cuda._sleep",),
    since="1.0",
    without="measured times of very short ops on CUDA contain the host's time to launch them",
)


def keep_busy(device: torch.device, cycles: int) -> None:
    """Keep a CUDA device busy, so that the host comes ahead of it; others are left alone."""
    if device.type == "cuda" and BUSY.there:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
