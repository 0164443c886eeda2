"""The default schedule: the fastest, as simulated, of those that fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.timeline import Timeline
from fxpipe.ir.units import show_bytes

Candidate = tuple[Schedule, Timeline]

ALIKE = 1e-9  # relative: times that differ less are equal but for rounding


def auto(candidates: Iterable[Candidate], memory: Mapping[str, int] | None = None) -> Candidate:
    """The schedule, with its timeline, of the shortest step in which every device stays within its `memory`, in bytes;
    of equally short ones, the first by name. Raises ValueError, with what each would need, if none fits.

    >>> from fxpipe.ir.schedule.schedule import parse
    >>> from fxpipe.ir.timeline import even
    >>> whole, early = parse("F0 F1 B1 B0", name="gpipe"), parse("F0 B0 F1 B1", name="1f1b")
    >>> auto([(whole, even(whole)), (early, even(early))])[0].name
    '1f1b'
    """
    every = sorted(candidates, key=lambda candidate: candidate[0].name)
    if not every:
        raise ValueError("there are no schedules to pick from")
    fitting = [candidate for candidate in every if _too_much(candidate[1], memory or {}) is None]
    if not fitting:
        lines = (f"  {schedule.name}: {_too_much(timeline, memory or {})}" for schedule, timeline in every)
        raise ValueError("\n".join(["no schedule fits into memory; more micro-batches are smaller:", *lines]))
    shortest = min(timeline.makespan for _, timeline in fitting)
    return next(candidate for candidate in fitting if candidate[1].makespan <= shortest * (1 + ALIKE))


def _too_much(timeline: Timeline, memory: Mapping[str, int]) -> str | None:
    """The first device without enough memory for the schedule, in words; None if all have enough."""
    if memory and not timeline.memory:
        raise ValueError(f"the timeline of {timeline.name!r} says nothing about memory; simulate it with `saved` bytes")
    for device, peak in zip(timeline.devices, timeline.high_water, strict=False):
        if peak > memory.get(device, peak):
            return f"{device} needs {show_bytes(peak)} and has {show_bytes(memory[device])}"
    return None
