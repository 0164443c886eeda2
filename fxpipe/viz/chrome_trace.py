"""A timeline as a Chrome trace: load it in ui.perfetto.dev or chrome://tracing to zoom into a long step.

Devices are the threads of one process and links those of another; memory is a counter per device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxpipe.ir.dataclass_json import write
from fxpipe.ir.timeline import KINDS, Span, Timeline

DEVICES, LINKS = 0, 1  # the two processes


def trace(timeline: Timeline) -> str:
    """The JSON text, one event per line."""
    return write({"displayTimeUnit": "ms", "traceEvents": list(_events(timeline))})


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    thread = {name: (DEVICES, tid) for tid, name in enumerate(timeline.devices)}
    thread |= {name: (LINKS, tid) for tid, name in enumerate(timeline.links)}
    processes = (DEVICES, f"{timeline.name}: devices"), (LINKS, f"{timeline.name}: links")
    for pid, name in processes[: 2 if timeline.links else 1]:
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for name, (pid, tid) in thread.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for span in sorted(timeline.spans, key=lambda span: (span.start, thread[span.where])):
        yield _complete(timeline, span, *thread[span.where])
    for device, steps in zip(timeline.devices, timeline.memory, strict=False):
        for at, held in steps:
            ts = _microseconds(at - timeline.start)
            yield {"ph": "C", "name": f"memory of {device}", "pid": DEVICES, "ts": ts, "args": {"bytes": held}}


def _complete(timeline: Timeline, span: Span, pid: int, tid: int) -> dict[str, Any]:
    args: dict[str, Any] = {"stage": span.stage, "micro_batch": span.micro_batch}
    if span.label:
        args["values"] = span.label
    name = span.label if span.kind == "T" and span.label else f"{span.stage}{span.kind}{span.micro_batch}"
    ts, dur = _microseconds(span.start - timeline.start), _microseconds(span.seconds)
    return {
        "ph": "X", "name": name, "cat": KINDS[span.kind], "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args,
    }  # fmt: skip


def _microseconds(seconds: float) -> float:
    """Seconds as microseconds, the format's unit, rounded to a nanosecond."""
    return round(seconds * 1e6, 3)
