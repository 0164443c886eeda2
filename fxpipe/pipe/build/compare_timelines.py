"""The predicted timeline of a step beside the measured one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fxpipe.engines.local.memory_dry_run import memory_of_step
from fxpipe.ir.graph.graph import Graph, is_opaque, op_name
from fxpipe.ir.graph.ops import RECURRENT
from fxpipe.ir.timeline import Timeline, compare

from .build import Build, predict
from .build_cache import BuildCache


@dataclass(frozen=True)
class Timed:
    """A step with a timeline. `inputs`: on the meta device."""

    made: Build
    timeline: Timeline
    inputs: Sequence[Any]


def beside_predicted(cache: BuildCache, timed: Timed, rehearsed: tuple[Build, Timeline] | None) -> str:
    """The table of `Pipe.compare`: the rehearsed timeline, if it is for the same build and chunks, else the predicted
    one, beside the measured one."""
    chunks = 1 + max(span.micro_batch for span in timed.timeline.spans)
    if rehearsed is not None:
        made, predicted = rehearsed
        if made is timed.made and chunks == 1 + max(span.micro_batch for span in predicted.spans):
            return compare(predicted, timed.timeline)
    predicted, note = with_memory(predict(timed.made, chunks), cache, timed)
    return compare(predicted, timed.timeline) + note


def with_memory(predicted: Timeline, cache: BuildCache, timed: Timed) -> tuple[Timeline, str]:
    """The timeline with the memory of CPU workers from a dry run on the meta device, and ""; or the timeline as it is,
    and a line that says why there was no dry run. Over ranks and on GPUs memory stays as predicted."""
    made = timed.made
    if cache.options.ranks or not all(label.startswith("cpu") for label in made.program.devices):
        return predicted, ""
    odd = unknown_memory(made.graph)
    if odd is None and not any(stage.replicas for stage in made.plan.stages):
        try:
            found = memory_of_step(cache.live(made).step_scheduler, timed.inputs, cache.options.chunks)
            return replace(predicted, memory=found), ""
        except Exception as error:  # the model reads values, and meta tensors have none
            odd = str(error).partition("\n")[0]
    return predicted, f"\nmemory is estimated: {odd or 'stages have replicas'}"


def unknown_memory(graph: Graph) -> str | None:
    """A text that names the first op whose memory only a run can tell; None if there is no such op."""
    for op in graph.ops:
        if op_name(op) in RECURRENT or is_opaque(op):
            return f"what {op.name}, at {op.origin}, keeps is known once it runs"
    return None
