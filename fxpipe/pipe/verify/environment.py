"""The facts of a report on a pipe and its machine: versions, devices, options, plan, schedule."""

from __future__ import annotations

import os
import platform
from dataclasses import fields

import torch

from fxpipe.ir.plan import plan as plans
from fxpipe.ir.units import show_bytes
from fxpipe.pipe.build.build import Build
from fxpipe.pipe.build.build_report import explain
from fxpipe.pipe.build.compiled.compiled_stages import Backend
from fxpipe.pipe.build.local_cluster import cores, cpu_memory
from fxpipe.pipe.options.compile_options import Options
from fxpipe.runtime.accelerator import present, properties

from .versions import versions


def cpu() -> str:
    """Cores and memory."""
    return f"{cores()} of {os.cpu_count()} cores, {show_bytes(cpu_memory())} of memory"


def threads() -> str:
    """The number of threads of each CPU worker."""
    said = os.environ.get("OMP_NUM_THREADS", "not set")
    return f"{torch.get_num_threads()} for each CPU worker on {cores()} cores, OMP_NUM_THREADS is {said}"


def gpus() -> dict[str, str]:
    """Name and memory of each accelerator, by its label."""
    found = {str(device): properties(device) for device in present()}
    return {label: f"{one.name}, {show_bytes(one.total_memory)}" for label, one in found.items()}


def describe(options: Options, made: Build, backend: Backend | None) -> dict[str, str]:
    """The facts of a report, by title."""
    shown = "\n".join(
        f"{one.name} = {getattr(options, one.name)!r}" for one in fields(options) if one.name != "cluster"
    )
    return {
        "versions": f"{versions()}, {platform.platform()}",
        "devices": "\n".join(
            f"{what}: {text}" for what, text in {"CPU": cpu(), "threads": threads(), **gpus()}.items()
        ),
        "options": shown,
        "plan": plans.dump(made.plan),
        "schedule": str(made.schedule),
        "stages": explain(made, backend),
    }
