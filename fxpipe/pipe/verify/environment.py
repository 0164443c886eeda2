"""What of this machine and of a pipe matters to who reads a report: versions, devices, options, plan, schedule."""

from __future__ import annotations

import os
import platform
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version

import torch

from fxpipe.ir.plan import plan as plans
from fxpipe.ir.units import show_bytes
from fxpipe.pipe.build.build import Build
from fxpipe.pipe.build.build_report import explain
from fxpipe.pipe.build.compiled_stages import Backend
from fxpipe.pipe.build.local_cluster import cores, cpu_memory
from fxpipe.pipe.options.compile_options import Options


def versions() -> str:
    """Of Python, torch and fxpipe, and the system."""
    return (
        f"fxpipe {own_version()}, torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"
    )


def own_version() -> str:
    try:
        return version("fxpipe")
    except PackageNotFoundError:
        return "not installed"


def devices() -> str:
    """The devices of this machine, one a line."""
    lines = [
        f"CPU: {cores()} cores, {show_bytes(cpu_memory())}, {torch.get_num_threads()} threads, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'not set')}"
    ]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        lines.append(f"cuda:{index}: {found.name}, {show_bytes(found.total_memory)}")
    return "\n".join(lines)


def describe(options: Options, made: Build, backend: Backend | None) -> dict[str, str]:
    """The facts of a report, by title."""
    shown = "\n".join(
        f"{one.name} = {getattr(options, one.name)!r}" for one in fields(options) if one.name != "cluster"
    )
    return {
        "versions": versions(),
        "devices": devices(),
        "options": shown,
        "plan": plans.dump(made.plan),
        "schedule": str(made.schedule),
        "stages": explain(made, backend),
    }
