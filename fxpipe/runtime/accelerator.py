"""The devices that torch runs on here: the CPU, and one kind of accelerator, such as CUDA or XPU, if there is one.

torch has one interface for all accelerators with streams: `torch.accelerator`, `torch.Stream`, `torch.Event` and
a module of the same members for each kind. fxpipe uses no other, so what it does on one kind it does on all.
"""

from __future__ import annotations

from typing import Any

import torch

WITHOUT_STREAMS = ("cpu", "meta", "mps")


def has_streams(device: torch.device) -> bool:
    """Whether the device works asynchronously, in streams."""
    return device.type not in WITHOUT_STREAMS


def kind() -> str | None:
    """The kind of accelerator that torch is for, such as "cuda"; None for the CPU alone. Whether a device of it is
    there, `count` says."""
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def count(kind_of_device: str | None = None) -> int:
    """How many accelerators there are; 0 if they are not of the kind that is asked for."""
    return torch.accelerator.device_count() if kind_of_device in (None, kind()) else 0


def is_here(device: torch.device) -> bool:
    """Whether this machine has the device."""
    return not has_streams(device) or (device.index or 0) < count(device.type)


def present() -> tuple[torch.device, ...]:
    """All accelerators that are there."""
    own = kind()
    return () if own is None else tuple(torch.device(own, index) for index in range(count()))


def kinds() -> tuple[str, ...]:
    """The kinds of devices that autocast may be on for."""
    own = kind()
    return ("cpu",) if own is None else ("cpu", own)


def properties(device: torch.device) -> Any:
    """What the driver tells of an accelerator: `name`, and `total_memory` in bytes."""
    return torch.get_device_module(device).get_device_properties(device)
