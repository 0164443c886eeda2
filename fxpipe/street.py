"""The street, whole: from a captured graph to generated files that run. Plain functions between frozen values.

    Graph ─estimate─▶ Profile ─plan─▶ Plan ─gpipe─▶ Schedule
      └────────────lower────────────────┴─▶ Program ─emit─▶ files ─load─▶ scheduler
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from .codegen.load import bind, load_package, package, write
from .ir import graph as graphs
from .ir import plan as plans
from .ir.graph import Graph
from .ir.plan import Plan
from .ir.profile import Profile
from .ir.program import Program
from .ir.schedule import Schedule
from .options import Options
from .passes import lower


@dataclass(frozen=True)
class Build:
    """Everything made for one kind of call, from the capture to the code that runs. `trail` has the program after each
    pass that changed it, by the pass's name."""

    graph: Graph
    profile: Profile
    plan: Plan
    schedule: Schedule
    program: Program
    trail: Mapping[str, Program]
    files: Mapping[str, str]
    package: ModuleType
    scheduler: Any
