"""Random numbers that depend on the micro-batch and the op, and on nothing else.

torch's default CPU generator is shared by all threads, so the numbers would depend on which thread draws first, even if
each thread saved its state. Instead each run has one seed, and each random op of the model a number. The op runs under
a lock, with the default generator seeded from (run, micro-batch, op); then the generator's state is restored. So the
numbers are the same for every number of stages and workers, and again in recomputation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock

import torch

from .accelerator import WITHOUT_STREAMS, kind, present

_MASK = (1 << 64) - 1
_locks: dict[torch.device, Lock] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.clear)  # a lock held by a thread of the parent would never be released


def mix(seed: int, micro_batch: int, draw: int) -> int:
    """The 63-bit seed of random op `draw` in one micro-batch: well spread, the same on every machine.

    >>> mix(1, 0, 0) == mix(1, 0, 0)
    True
    >>> len({mix(seed, i, k) for seed in range(10) for i in range(10) for k in range(10)})
    1000
    """
    value = seed & _MASK
    for part in (micro_batch, draw):
        value = _scramble((value + 0x9E3779B97F4A7C15 * (part + 1)) & _MASK)
    return value >> 1  # generators take any 64 bits, but a seed that prints as a positive number is easier to pass on


def _scramble(value: int) -> int:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the value."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def new_seed() -> int:
    """The seed of a run, drawn from torch's default CPU generator: `torch.manual_seed` makes the run reproducible."""
    return int(torch.randint(1 << 62, ()).item())


def replica_seed(seed: int, replica: int) -> int:
    """The seed of a run for one replica of a stage: replicas must draw different numbers for their samples. Replica 0
    has the seed of the run, as does a stage without replicas."""
    return mix(seed, 0, -replica - 1) if replica else seed


class Draws:
    """Seeds the random ops of one task. Generated code says `with draw(3): h = F.dropout(h)`."""

    __slots__ = ("device", "micro_batch", "seed")

    def __init__(self, seed: int, micro_batch: int, device: torch.device) -> None:
        self.seed, self.micro_batch, self.device = seed, micro_batch, device

    def __call__(self, draw: int) -> AbstractContextManager[None]:
        return seeded(mix(self.seed, self.micro_batch, draw), self.device)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A context in which the device's default generator is seeded, under a lock. The state before is restored at the
    end."""
    generator = generator_of(device)
    with _locks.setdefault(device, Lock()):
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(state)


@contextmanager
def nobody_draws() -> Iterator[None]:
    """In this context no other thread draws: all locks of generators are held."""
    with ExitStack() as locks:
        for device in (torch.device("cpu"), *present()):
            locks.enter_context(_locks.setdefault(device, Lock()))
        yield


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    if device.type in WITHOUT_STREAMS:
        return torch.default_generator
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    found: torch.Generator = torch.get_device_module(device).default_generators[index]
    return found


def fork_rng(devices: Sequence[torch.device] | None = None) -> AbstractContextManager[None]:
    """A context after which the default generators of the CPU and these accelerators, or all, are as before."""
    return torch.random.fork_rng(present() if devices is None else devices, device_type=kind() or "cuda")
