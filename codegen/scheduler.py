"""The scheduler of a program as a Python file: what runs before what, and how values get where they are used.

    class Scheduler(Pipeline):
        ready_1(m, i)     before stage 1 runs on micro-batch i: the order of backward, copies from other devices
        compute_1(m, i)   the stage, on its worker, and what can be let go afterwards

Micro-batches are a loop, in `Pipeline.run`, so the file grows with the stages alone. Between CPU workers nothing is
copied, and nothing about copies is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from fxpipe.codegen.lines import INDENT, Brackets, layout
from fxpipe.codegen.names import clip, doc_prose, prose, state_path, string
from fxpipe.codegen.places import Places, torch_device
from fxpipe.codegen.stage import constant_names
from fxpipe.ir.program import Loan, Program, Stage
from fxpipe.ir.types import TensorType

WIDTH = 110


def emit_scheduler(program: Program, chunks: int, grid: str | None = None) -> str:
    """The source of `scheduler.py`. `grid` is the schedule as text; without it, GPipe's clock for `chunks`."""
    return _Emitter(program, chunks, grid).file()
