"""A step of each schedule as torch's profiler sees it, drawn from the ranges in its trace.

    python -m benchmarks.profiles [--device cuda:0] [--out FILE.svg]

Two workers (on a GPU both are on it), six micro-batches, a model of equal layers. In the trace each worker is a thread,
and what it does is a range such as `F1.3`; the picture has these ranges as boxes, so it looks like the schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: OpenMP spins, and busy workers become ten times slower

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

import fxpipe
from fxpipe.ir.timeline import Span, Timeline
from fxpipe.viz import comparison_picture

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
WORKERS, CHUNKS, WIDTH, LAYERS = 2, 6, 512, 8
RANGE = re.compile(r"([FBIWR])(\d+)\.(\d+)")
Event = dict[str, Any]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def recorded(schedule: str, device: str) -> list[Event]:
    """The events of a step in the trace of the profiler."""
    devices = [f"cpu:{k}" for k in range(WORKERS)] if device == "cpu" else [device] * WORKERS
    pipe = fxpipe.compile(model(), devices=devices, chunks=CHUNKS, schedule=schedule, checkpoint="never")
    x = torch.randn(CHUNKS * 256, WIDTH, device=device)
    for _ in range(3):
        pipe.step(x, target=x, loss_fn=F.mse_loss)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device != "cpu" else [])]
    with profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as found:
        pipe.step(x, target=x, loss_fn=F.mse_loss)
        if device != "cpu":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        found.export_chrome_trace(path := f"{folder}/trace.json")
        events: list[Event] = json.loads(Path(path).read_text())["traceEvents"]
    pipe.close()
    return events


def timeline(name: str, events: list[Event]) -> Timeline:
    """The ranges of actions as a timeline, a thread as a device. On a GPU the ranges of the host are not the kernels'
    time, which the profiler has as ranges of the device: then these."""
    threads: defaultdict[Any, list[tuple[Event, re.Match[str]]]] = defaultdict(list)
    on_device = any(event.get("cat") == "gpu_user_annotation" for event in events)
    for event in events:
        found = RANGE.fullmatch(event.get("name", ""))
        if found and event["ph"] == "X" and (event.get("cat") == "gpu_user_annotation") == on_device:
            threads[event["tid"]].append((event, found))
    by_stage = sorted(threads.values(), key=lambda rows: min(int(found[2]) for _, found in rows))
    begin = min(event["ts"] for rows in by_stage for event, _ in rows)
    spans, devices = list[Span](), tuple(f"worker {k}" for k in range(len(by_stage)))
    for where, rows in zip(devices, by_stage, strict=True):
        for event, found in rows:
            start, end = ((at - begin) * 1e-6 for at in (event["ts"], event["ts"] + event["dur"]))
            spans.append(Span(where, start, end, found[1], int(found[2]), int(found[3])))
    return Timeline(name, devices, tuple(spans))


def main() -> None:
    parser = argparse.ArgumentParser(description="A step of each schedule, from torch's profiler.")
    parser.add_argument("--device", default="cpu", help="such as cuda:0, for all workers")
    parser.add_argument("--out", metavar="FILE", help="the picture")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        print("There is no GPU here; nothing was measured.")
        return
    torch.set_num_threads(1)
    found = [(name, timeline(name, recorded(name, options.device))) for name in SCHEDULES]
    for _, line in found:
        print(line, "\n")
    if options.out:
        Path(options.out).write_text(comparison_picture.draw(found, "a step in torch's profiler"))


if __name__ == "__main__":
    main()
