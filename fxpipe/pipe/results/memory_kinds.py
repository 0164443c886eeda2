"""What is in a device's memory at the fullest moment of a step.

parameters  gradients  optimizer  activations  memory
80 MB       80 MB      160 MB     1.2 GB       1.52 GB of 16 GB
"""

from __future__ import annotations

from dataclasses import dataclass

from fxpipe.ir.plan.model_states import ModelStates
from fxpipe.ir.timeline import Timeline
from fxpipe.ir.units import show_bytes
from fxpipe.pipe.build.build import Build
from fxpipe.schedules.simulate.action_costs import stage_costs

KINDS = ("parameters", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class MemoryKinds:
    """Bytes on a device at the fullest moment of a step.

    - `parameters`, `gradients`, `optimizer`: as in `ModelStates`.
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


def memory_kinds(states: ModelStates, peak: int) -> MemoryKinds:
    """The kinds in a peak of `peak` bytes, of which these states are a part.

    >>> memory_kinds(ModelStates(10, 10, 20), 100)
    MemoryKinds(parameters=10, gradients=10, optimizer=20, activations=60)
    """
    held, weights, gradients = round(sum(states)), round(states.parameters), round(states.gradients)
    return MemoryKinds(weights, gradients, held - weights - gradients, peak - held)


def predicted_kinds(made: Build, kept: Timeline | None) -> dict[str, MemoryKinds]:
    """The kinds on each device in a build's predicted timeline, by label: each parameter with its gradient, without an
    optimizer. `kept`: a timeline of what is kept for backward, if that is known better. Empty if there is no memory."""
    weights = dict.fromkeys(made.timeline.devices, 0)
    for stage, cost in zip(made.plan.stages, stage_costs(made.plan, made.profile, copies=1), strict=True):
        for label in weights.keys() & set(stage.devices):
            weights[label] += cost.fixed
    peaks = made.timeline.high_water
    if kept is not None:
        peaks = tuple(2 * own + peak for own, peak in zip(weights.values(), kept.high_water, strict=True))
    known = zip(weights.items(), peaks, strict=False)
    return {label: memory_kinds(ModelStates(own, own, 0), peak) for (label, own), peak in known}
