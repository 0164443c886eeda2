"""What is in a device's memory at the fullest moment of a step.

parameters  gradients  optimizer  activations  memory
80 MB       80 MB      160 MB     1.2 GB       1.52 GB of 16 GB
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.ir.units import show_bytes

KINDS = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class MemoryKinds:
    """Bytes on a device at the fullest moment of a step.

    - `optimizer`: what it keeps for each parameter, and master copies.
    - `activations`: what waits for backward, recomputed or not, and what a stage takes.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations

    def cells(self) -> tuple[str, ...]:
        """The kinds as text, in the order of `KINDS`."""
        return tuple(show_bytes(getattr(self, kind)) for kind in KINDS)


def memory_kinds(parameters: float, copies: float, peak: int) -> MemoryKinds:
    """The kinds in a peak of `peak` bytes, of which `copies` bytes are there for each byte of parameters: the first is
    the parameter, the second its gradient, the others are the optimizer's.

    >>> memory_kinds(10, 4, 100)
    MemoryKinds(parameters=10, gradients=10, optimizer=20, activations=60)
    >>> memory_kinds(10, 1.5, 20)
    MemoryKinds(parameters=10, gradients=5, optimizer=0, activations=5)
    """
    one, two = min(copies, 1.0), min(copies, 2.0)
    held = round(parameters * copies)
    weights, gradients = round(parameters * one), round(parameters * (two - one))
    return MemoryKinds(weights, gradients, held - weights - gradients, peak - held)
