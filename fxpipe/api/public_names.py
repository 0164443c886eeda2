"""The public names that need torch, which takes seconds to import. The command line imports them only where it must."""

from __future__ import annotations

from fxpipe.api import backend
from fxpipe.api.compile import compile, load
from fxpipe.api.plan import plan
from fxpipe.api.profile import profile
from fxpipe.api.search import search
from fxpipe.ir.cluster.cluster import Cluster, Device, Link, Switch
from fxpipe.ir.cluster.matrix_speed import MatrixSpeed
from fxpipe.ir.plan.layer_chain import Chain, Layer
from fxpipe.ir.plan.plan import Plan
from fxpipe.ir.plan.profile import Profile
from fxpipe.ir.sample_lists import rows
from fxpipe.ir.schedule.schedule import Schedule
from fxpipe.ir.timeline import Timeline
from fxpipe.pipe.build.local_cluster import detect
from fxpipe.pipe.materialize import materialize
from fxpipe.pipe.pipe import Pipe
from fxpipe.pipe.results.planned import Planned
from fxpipe.pipe.results.searched import Searched
from fxpipe.runtime.autograd.is_recomputing import is_recomputing

__all__ = [
    "Chain",
    "Cluster",
    "Device",
    "Layer",
    "Link",
    "MatrixSpeed",
    "Pipe",
    "Plan",
    "Planned",
    "Profile",
    "Schedule",
    "Searched",
    "Switch",
    "Timeline",
    "backend",
    "compile",
    "detect",
    "is_recomputing",
    "load",
    "materialize",
    "plan",
    "profile",
    "rows",
    "search",
]
